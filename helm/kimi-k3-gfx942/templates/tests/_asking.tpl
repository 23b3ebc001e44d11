{{/* What the pods of `helm test` have in common; pods and no Jobs, since `--logs` shows the logs of pods alone. */}}

{{/* A pod up to its containers: list of the root, what its name ends with, and its place among the hooks. */}}
{{- define "kimi-k3.testPod" -}}
{{- $root := index . 0 -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ include "kimi-k3.fullname" $root }}-{{ index . 1 }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "kimi-k3.labels" $root | nindent 4 }}
    app.kubernetes.io/component: test
  annotations:
    helm.sh/hook: test
    helm.sh/hook-weight: {{ index . 2 | quote }}
    helm.sh/hook-delete-policy: before-hook-creation
spec:
  restartPolicy: Never
  serviceAccountName: {{ include "kimi-k3.serviceAccount" $root | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- include "kimi-k3.pullSecrets" $root | nindent 2 }}
{{- end -}}

{{/* Whom `kimi-k3 verify` asks, and by what it is let in. */}}
{{- define "kimi-k3.asked" -}}
{{- $facts := include "kimi-k3.facts" . | fromJson -}}
{{- $name := include "kimi-k3.fullname" . -}}
{{- $scheme := include "kimi-k3.scheme" . -}}
- --engine={{ $scheme }}://{{ $name }}.{{ .Release.Namespace }}.svc:{{ int .Values.service.port }}
- --sidecar={{ $scheme }}://{{ $name }}-sidecar.{{ .Release.Namespace }}.svc:{{ int .Values.service.sidecarPort }}
- --weights={{ $facts.weights }}
{{- if .Values.auth.apiKeySecret.name }}
- --api-key-file=/run/secrets/engine/api-key
{{- end }}
{{- if .Values.auth.sidecarTokenSecret.name }}
- --token-file=/run/secrets/sidecar/token
{{- end }}
{{- if and .Values.tls.secretName .Values.tls.caKey }}
- --ca-file=/run/secrets/tls/{{ .Values.tls.caKey }}
{{- end }}
{{- end -}}

{{/* Where the Secrets of these arguments are. */}}
{{- define "kimi-k3.askedMounts" -}}
{{- if .Values.auth.apiKeySecret.name }}
- {name: api-key, mountPath: /run/secrets/engine, readOnly: true}
{{- end }}
{{- if .Values.auth.sidecarTokenSecret.name }}
- {name: sidecar-token, mountPath: /run/secrets/sidecar, readOnly: true}
{{- end }}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /run/secrets/tls, readOnly: true}
{{- end }}
{{- end -}}
