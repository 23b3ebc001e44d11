{{/*
What the templates know, as JSON: the profile's facts, and what the values make of them. Seconds are whole numbers.
*/}}
{{- define "kimi-k3.facts" -}}
{{- $known := .Files.Get "files/profiles.json" | fromJson -}}
{{- if not (hasKey $known.profiles .Values.profile) -}}
{{- fail (printf "profile: %q is not known; use one of %s" .Values.profile (keys $known.profiles | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $profile := index $known.profiles .Values.profile -}}
{{- $start := include "kimi-k3.seconds" (list .Values.startup.timeoutSeconds $profile.startTimeout) | int -}}
{{- $drain := include "kimi-k3.seconds" (list .Values.shutdown.drainSeconds $profile.drainTimeout) | int -}}
{{- $delay := include "kimi-k3.seconds" (list .Values.shutdown.readinessDelaySeconds $profile.readinessDelay) | int -}}
{{- $probe := add $start $known.margins.startupProbe | int -}}
{{- $probe = include "kimi-k3.seconds" (list .Values.startup.probeSeconds $probe) | int -}}
{{- $needed := add $delay $drain $known.margins.teardown | int -}}
{{- $download := ternary .Values.model.download.timeoutSeconds 0 .Values.model.download.enabled | int -}}
{{- $remote := get .Values.overrides "trust-remote-code" | toString -}}
{{- $over := sub $known.margins.progressDeadline $known.margins.startupProbe | int -}}
{{- dict
      "enginePort" (int $known.ports.engine)
      "sidecarPort" (int $known.ports.sidecar)
      "gpus" (int $profile.gpusPerNode)
      "nodes" (int $profile.nodes)
      "settings" $known.settings
      "deviceIds" $profile.deviceIds
      "gpuNames" $profile.gpuNames
      "notStartable" ($profile.notStartable | default "")
      "weights" (.Values.weights.format | default $profile.weights)
      "trustRemoteCode" (ternary $profile.trustRemoteCode (eq $remote "true") (eq $remote ""))
      "start" $start
      "drain" $drain
      "delay" $delay
      "probe" $probe
      "probeNeeded" (add $start $known.margins.startupProbe | int)
      "graceNeeded" $needed
      "grace" (include "kimi-k3.seconds" (list .Values.shutdown.graceSeconds $needed) | int)
      "deadline" (add $probe $over (int .Values.startup.pullSeconds) $download | int)
      "checkpoint" (include "kimi-k3.checkpoint" .)
    | toJson -}}
{{- end -}}

{{/* The given number, 0 included, or the one that is meant without it. */}}
{{- define "kimi-k3.seconds" -}}
{{- if kindIs "invalid" (index . 0) -}}{{ index . 1 | int }}{{- else -}}{{ index . 0 | int }}{{- end -}}
{{- end -}}

{{/* Where the engine finds the checkpoint. */}}
{{- define "kimi-k3.checkpoint" -}}
{{- if .Values.model.inImage -}}
{{- .Values.model.inImage | trimSuffix "/" -}}
{{- else -}}
{{- list "/models" (.Values.model.path | trimAll "/") | compact | join "/" -}}
{{- end -}}
{{- end -}}

{{/* Bytes of a quantity, where it is written with a binary or decimal suffix; enough to compare memory. */}}
{{- define "kimi-k3.bytes" -}}
{{- $text := toString . -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 -}}
{{- $suffix := regexFind "[A-Za-z]*$" $text -}}
{{- $factor := 1 -}}
{{- if $suffix -}}{{- $factor = index $units $suffix | default 0 -}}{{- end -}}
{{- mulf (trimSuffix $suffix $text | float64) $factor | int64 -}}
{{- end -}}
