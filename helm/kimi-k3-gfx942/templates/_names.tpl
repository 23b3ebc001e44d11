{{/* Names and labels. */}}

{{- define "kimi-k3.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/*
What a Service may be called, with room for every suffix of ours and of a Deployment's pods: 40 characters, of which
the last seven tell apart what was cut to the same.
*/}}
{{- define "kimi-k3.fullname" -}}
{{- $name := include "kimi-k3.name" . -}}
{{- $full := printf "%s-%s" .Release.Name $name -}}
{{- if .Values.fullnameOverride -}}
{{- $full = .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- $full = .Release.Name -}}
{{- end -}}
{{- $full = replace "." "-" $full -}}
{{- if regexMatch "^[0-9]" $full -}}{{- $full = printf "k-%s" $full -}}{{- end -}}
{{- if gt (len $full) 40 -}}
{{- $full = printf "%s-%s" ($full | trunc 33) ($full | sha256sum | trunc 6) -}}
{{- end -}}
{{- $full | trimSuffix "-" -}}
{{- end -}}

{{- define "kimi-k3.selector" -}}
app.kubernetes.io/name: {{ include "kimi-k3.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kimi-k3.labels" -}}
{{ include "kimi-k3.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* The pods that serve, and no test or download of the release. */}}
{{- define "kimi-k3.engineSelector" -}}
{{ include "kimi-k3.selector" . }}
app.kubernetes.io/component: engine
{{- end -}}

{{/* All pods of a deployment over several nodes, of which those with the API are "engine". */}}
{{- define "kimi-k3.nodesSelector" -}}
{{- if eq (include "kimi-k3.facts" . | fromJson | dig "nodes" 1 | int) 1 -}}
matchLabels:
  {{- include "kimi-k3.engineSelector" . | nindent 2 }}
{{- else -}}
matchLabels:
  {{- include "kimi-k3.selector" . | nindent 2 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [engine, worker]}
{{- end -}}
{{- end -}}

{{- define "kimi-k3.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "kimi-k3.fullname" .) -}}
{{- end -}}

{{/* What the API and the sidecar speak. */}}
{{- define "kimi-k3.scheme" -}}
{{- if .Values.tls.secretName -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{/* An image's whole name: list of the root and "engine" or "sidecar". */}}
{{- define "kimi-k3.image" -}}
{{- $root := index . 0 -}}
{{- $image := index $root.Values.image (index . 1) -}}
{{- $name := list $root.Values.image.registry $image.repository | compact | join "/" -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name ($image.tag | default $root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* Names of Secrets for the registry, as a pod's specification has them: a list, or nothing. */}}
{{- define "kimi-k3.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end -}}
{{- end -}}
