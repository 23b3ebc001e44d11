{{/* A claim: list of the root, the volume's name, and its size, class and modes. */}}
{{- define "kimi-k3.claim" -}}
{{- $root := index . 0 -}}
{{- $volume := index . 2 -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ include "kimi-k3.fullname" $root }}-{{ index . 1 }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "kimi-k3.labels" $root | nindent 4 }}
  {{- if eq (index . 1) "model" }}
  annotations:
    # Hours of download are not thrown away by an uninstall.
    helm.sh/resource-policy: keep
  {{- end }}
spec:
  accessModes: {{ toJson $volume.accessModes }}
  {{- if not (kindIs "invalid" $volume.storageClassName) }}
  storageClassName: {{ $volume.storageClassName | quote }}
  {{- end }}
  resources:
    requests: {storage: {{ $volume.size }}}
{{- end -}}
