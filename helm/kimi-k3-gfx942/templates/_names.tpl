{{/* Names and labels. */}}

{{- define "kimi-k3.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* 40 characters, so that every suffix of ours, and those of a Deployment's pods, still fit a label. */}}
{{- define "kimi-k3.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "kimi-k3.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kimi-k3.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
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

{{- define "kimi-k3.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "kimi-k3.fullname" .) -}}
{{- end -}}

{{/* What the API and the sidecar speak. */}}
{{- define "kimi-k3.scheme" -}}
{{- ternary "https" "http" (ne .Values.tls.secretName "") -}}
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
