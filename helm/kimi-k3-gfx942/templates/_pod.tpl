{{/*
The pod: first the sidecar, which stays, then what must hold before a start, then the engine. A list: the root, and the
pod's component, "engine" or, on a node without an API, "worker".
*/}}
{{- define "kimi-k3.pod" -}}
{{- $component := index . 1 -}}
{{- with index . 0 -}}
{{- $facts := include "kimi-k3.facts" . | fromJson -}}
metadata:
  # No version: a new chart must not restart what it does not change.
  labels:
    {{- include "kimi-k3.selector" . | nindent 4 }}
    app.kubernetes.io/component: {{ $component }}
  annotations:
    kubectl.kubernetes.io/default-container: engine
    {{- if gt (int $facts.nodes) 1 }}
    {{- with .Values.multiNode.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- end }}
spec:
  serviceAccountName: {{ include "kimi-k3.serviceAccount" . | quote }}
  automountServiceAccountToken: false
  # A Service called vllm would become VLLM_PORT, which vLLM takes for its own.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ int $facts.grace }}
  {{- if and (gt (int $facts.nodes) 1) .Values.multiNode.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- include "kimi-k3.pullSecrets" . | nindent 2 }}
  {{- include "kimi-k3.placement" . | nindent 2 }}
  securityContext:
    {{- include "kimi-k3.podSecurity" . | nindent 4 }}
    {{- with .Values.security.gpuGroups }}
    supplementalGroups: {{ toJson . }}
    {{- end }}
  initContainers:
    - name: sidecar
      image: {{ include "kimi-k3.image" (list . "sidecar") }}
      {{- with .Values.image.pullPolicy }}
      imagePullPolicy: {{ . }}
      {{- end }}
      restartPolicy: Always
      args: [sidecar]
      env:
        - {name: KIMI_K3_SIDECAR_HOST, value: {{ .Values.service.listen | quote }}}
        - {name: KIMI_K3_SIDECAR_PORT, value: {{ int $facts.sidecarPort | quote }}}
        {{- if .Values.auth.sidecarTokenSecret.name }}
        - {name: KIMI_K3_SIDECAR_TOKEN_FILE, value: /run/secrets/sidecar/token}
        {{- end }}
        {{- if .Values.tls.secretName }}
        - {name: KIMI_K3_SIDECAR_TLS_CERT_FILE, value: /run/secrets/tls/tls.crt}
        - {name: KIMI_K3_SIDECAR_TLS_KEY_FILE, value: /run/secrets/tls/tls.key}
        {{- end }}
      ports:
        - {name: sidecar, containerPort: {{ int $facts.sidecarPort }}}
      startupProbe:
        httpGet: {path: /livez, port: sidecar, scheme: {{ include "kimi-k3.scheme" . | upper }}}
        periodSeconds: 1
        failureThreshold: 60
      livenessProbe:
        httpGet: {path: /livez, port: sidecar, scheme: {{ include "kimi-k3.scheme" . | upper }}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      resources:
        {{- toYaml .Values.sidecar.resources | nindent 8 }}
      securityContext:
        {{- include "kimi-k3.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: state, mountPath: /state}
        - {name: sidecar-tmp, mountPath: /tmp}
        {{- if .Values.auth.sidecarTokenSecret.name }}
        - {name: sidecar-token, mountPath: /run/secrets/sidecar, readOnly: true}
        {{- end }}
        {{- if .Values.tls.secretName }}
        - {name: tls, mountPath: /run/secrets/tls, readOnly: true}
        {{- end }}
    {{- if .Values.model.download.enabled }}
    - name: checkpoint
      {{- include "kimi-k3.engineContainer" . | nindent 6 }}
      # Says how far the Job has come, and ends when everything is there.
      args:
        - checkpoint
        - wait
        - {{ $facts.checkpoint | quote }}
        - --revision={{ .Values.model.download.revision }}
        - --timeout={{ int .Values.model.download.timeoutSeconds }}
      # The index alone is 60 MB of names.
      resources:
        requests: {cpu: "1", memory: 2Gi}
        limits: {memory: 2Gi}
    {{- end }}
    - name: preflight
      {{- include "kimi-k3.engineContainer" . | nindent 6 }}
      # What may be wrong or is unknown is told, and the start goes on.
      args:
        - preflight
        - {{ $facts.checkpoint | quote }}
        - --warnings-pass
        {{- include "kimi-k3.chosen" . | nindent 8 }}
        {{- if $facts.gpus }}
        # A predecessor may still be giving back the GPUs' memory.
        - --wait-vram=120
        {{- end }}
      resources:
        {{- include "kimi-k3.engineResources" . | nindent 8 }}
  containers:
    - name: engine
      {{- include "kimi-k3.engineContainer" . | nindent 6 }}
      args:
        {{- include "kimi-k3.serve" . | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      ports:
        - {name: http, containerPort: {{ int $facts.enginePort }}}
      # The sidecar answers for the engine: vLLM's own health is silent while it loads.
      startupProbe:
        httpGet: {path: /startupz, port: {{ int $facts.sidecarPort }}, scheme: {{ include "kimi-k3.scheme" . | upper }}}
        periodSeconds: 10
        timeoutSeconds: 5
        {{- /* Another node may wait for the first one as long as a start takes. */}}
        failureThreshold: {{ mulf (ternary 2 1 (eq $component "worker")) (divf $facts.probe 10 | ceil) | int }}
      readinessProbe:
        httpGet: {path: /readyz, port: {{ int $facts.sidecarPort }}, scheme: {{ include "kimi-k3.scheme" . | upper }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 3
      # An engine that hangs is ended by the supervisor, which knows why. This is for a supervisor that hangs, and does
      # not depend on the sidecar.
      livenessProbe:
        exec: {command: [kimi-k3, healthcheck, --alive]}
        periodSeconds: 60
        timeoutSeconds: 30
        failureThreshold: 3
      resources:
        {{- include "kimi-k3.engineResources" . | nindent 8 }}
  volumes:
    {{- include "kimi-k3.volumes" . | nindent 4 }}
{{- end -}}
{{- end -}}

{{/* A value as a text: numbers are read as ones with a point, and toString would write 8388608 as 8.388608e+06. */}}
{{- define "kimi-k3.text" -}}
{{- if kindIs "string" . -}}{{- . -}}{{- else -}}{{- toJson . -}}{{- end -}}
{{- end -}}

{{/* What is served, as `kimi-k3 serve` and `kimi-k3 preflight` take it. */}}
{{- define "kimi-k3.chosen" -}}
- --profile={{ .Values.profile }}
{{- range $name, $value := .Values.overrides }}
- {{ printf "--set=%s=%s" $name (include "kimi-k3.text" $value) | quote }}
{{- end }}
{{- with .Values.weights.format }}
- --weights={{ . }}
{{- end }}
{{- if .Values.weights.acceptLossy }}
- --accept-lossy
{{- end }}
- --state-dir=/state
{{- end -}}

{{/* The command line of the engine: the program makes vLLM's of it. */}}
{{- define "kimi-k3.serve" -}}
{{- $facts := include "kimi-k3.facts" . | fromJson -}}
- serve
- {{ $facts.checkpoint | quote }}
{{ include "kimi-k3.chosen" . }}
{{- with .Values.weights.scaleRule }}
- --scale-rule={{ . }}
{{- end }}
- {{ printf "--host=%s" .Values.service.listen | quote }}
- --port={{ int $facts.enginePort }}
- {{ printf "--served-model-name=%s" .Values.model.servedName | quote }}
- --start-timeout={{ int $facts.start }}
- --drain-timeout={{ int $facts.drain }}
- --readiness-delay={{ int $facts.delay }}
{{- if gt (int $facts.nodes) 1 }}
- --node-rank=$(LWS_WORKER_INDEX)
- --leader-address=$(LWS_LEADER_ADDRESS)
- {{ printf "--leader-sidecar=%s://$(LWS_LEADER_ADDRESS):%d" (include "kimi-k3.scheme" .) (int $facts.sidecarPort) | quote }}
{{- if and .Values.tls.secretName .Values.tls.caKey }}
- {{ printf "--ca-file=/run/secrets/tls/%s" .Values.tls.caKey | quote }}
{{- end }}
{{- end }}
{{- if .Values.auth.apiKeySecret.name }}
- --api-key-file=/run/secrets/engine/api-key
{{- end }}
{{- if .Values.tls.secretName }}
- --tls-cert-file=/run/secrets/tls/tls.crt
- --tls-key-file=/run/secrets/tls/tls.key
{{- end }}
{{- end -}}

{{/* What all containers of the engine's image have in common. */}}
{{- define "kimi-k3.engineContainer" -}}
{{- $several := include "kimi-k3.facts" . | fromJson | dig "nodes" 1 | int | lt 1 -}}
image: {{ include "kimi-k3.image" (list . "engine") }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- if or .Values.engine.env $several }}
env:
  {{- if $several }}
  # The address by which vLLM's processes on the other nodes reach this one's.
  - {name: VLLM_HOST_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  - {name: KIMI_K3_SIDECAR_TOKEN_FILE, value: /run/secrets/sidecar/token}
  {{- with .Values.multiNode.networkInterface }}
  - {name: NCCL_SOCKET_IFNAME, value: {{ . | quote }}}
  - {name: GLOO_SOCKET_IFNAME, value: {{ . | quote }}}
  {{- end }}
  {{- end }}
  {{- range $name, $value := .Values.engine.env }}
  - {name: {{ $name }}, value: {{ include "kimi-k3.text" $value | quote }}}
  {{- end }}
{{- end }}
securityContext:
  {{- include "kimi-k3.containerSecurity" . | nindent 2 }}
volumeMounts:
  - {name: state, mountPath: /state}
  - {name: cache, mountPath: /cache}
  - {name: tmp, mountPath: /tmp}
  - {name: shared-memory, mountPath: /dev/shm}
  {{- if not .Values.model.inImage }}
  - {name: model, mountPath: /models, readOnly: true}
  {{- end }}
  {{- if .Values.auth.apiKeySecret.name }}
  - {name: api-key, mountPath: /run/secrets/engine, readOnly: true}
  {{- end }}
  {{- if $several }}
  - {name: sidecar-token, mountPath: /run/secrets/sidecar, readOnly: true}
  {{- end }}
  {{- if .Values.tls.secretName }}
  - {name: tls, mountPath: /run/secrets/tls, readOnly: true}
  {{- end }}
{{- end -}}

{{/* CPU and memory as given, and the profile's GPUs, which are the same in requests and limits. */}}
{{- define "kimi-k3.engineResources" -}}
{{- $facts := include "kimi-k3.facts" . | fromJson -}}
{{- $devices := dict -}}
{{- if int $facts.gpus -}}{{- $_ := set $devices .Values.engine.gpuResource (toString (int $facts.gpus)) -}}{{- end -}}
{{- if gt (int $facts.nodes) 1 -}}
{{- range $name, $count := .Values.multiNode.rdmaResources -}}{{- $_ := set $devices $name (toString $count) -}}{{- end -}}
{{- end -}}
{{- $resources := deepCopy .Values.engine.resources -}}
{{- if $devices -}}
{{- range $kind := list "requests" "limits" -}}
{{- $_ := set $resources $kind (merge (deepCopy $devices) (index $resources $kind | default dict)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "kimi-k3.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.security.runAsUser }}
runAsUser: {{ int64 . }}
runAsGroup: 0
{{- end }}
{{- with .Values.security.fsGroup }}
fsGroup: {{ int64 . }}
# A claim with 1.42 TiB is not gone through when its root is already right.
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: {{ .Values.security.seccompProfile }}}
{{- with .Values.security.seLinuxOptions }}
seLinuxOptions: {{ toJson . }}
{{- end }}
{{- end -}}

{{- define "kimi-k3.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where a pod with this profile may run. */}}
{{- define "kimi-k3.placement" -}}
{{- $facts := include "kimi-k3.facts" . | fromJson -}}
{{- $scheduling := .Values.scheduling -}}
{{- with $scheduling.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $scheduling.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and $facts.gpus (ne $scheduling.gpuNodes "none") }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            {{- if eq $scheduling.gpuNodes "device-id" }}
            # {{ join ", " $facts.gpuNames }}
            - {key: amd.com/gpu.device-id, operator: In, values: {{ toJson $facts.deviceIds }}}
            {{- else }}
            - {key: amd.com/gpu.product-name, operator: In, values: {{ toJson $scheduling.productNames }}}
            {{- end }}
            {{- if $scheduling.requireUnpartitioned }}
            - {key: amd.com/gpu.compute-memory-partition, operator: In, values: [spx_nps1]}
            {{- end }}
{{- end }}
tolerations:
  # A start costs more than a node that is away for some minutes; Kubernetes' own patience is 300 s.
  {{- range list "not-ready" "unreachable" }}
  - key: node.kubernetes.io/{{ . }}
    operator: Exists
    effect: NoExecute
    tolerationSeconds: {{ int $scheduling.nodeAwaySeconds }}
  {{- end }}
  {{- with $scheduling.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $scheduling.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{ merge (dict "labelSelector" (dict "matchLabels" (include "kimi-k3.engineSelector" $ | fromYaml))) . | toYaml | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "kimi-k3.volumes" -}}
{{- range $name := list "state" "cache" }}
{{- $volume := index $.Values.storage $name }}
- name: {{ $name }}
  {{- if $volume.persistent }}
  persistentVolumeClaim: {claimName: {{ include "kimi-k3.fullname" $ }}-{{ $name }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ $volume.size }}}
  {{- end }}
{{- end }}
- name: tmp
  emptyDir: {sizeLimit: 10Gi}
- name: sidecar-tmp
  emptyDir: {sizeLimit: 64Mi}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.engine.sharedMemory }}}
{{- include "kimi-k3.modelVolume" . | nindent 0 }}
{{- include "kimi-k3.secretVolumes" . | nindent 0 }}
{{- end -}}

{{/* The checkpoint, where it is not in the image. */}}
{{- define "kimi-k3.modelVolume" -}}
{{- with .Values.model }}
{{- if .existingClaim }}
- name: model
  persistentVolumeClaim: {claimName: {{ .existingClaim | quote }}, readOnly: true}
{{- else if .hostPath }}
- name: model
  hostPath: {path: {{ .hostPath | quote }}, type: Directory}
{{- else if .download.enabled }}
- name: model
  persistentVolumeClaim: {claimName: {{ include "kimi-k3.fullname" $ }}-model}
{{- end }}
{{- end }}
{{- end -}}

{{/* The Secrets that were named, as files for the group. */}}
{{- define "kimi-k3.secretVolumes" -}}
{{- with .Values.auth.apiKeySecret }}
{{- if .name }}
- name: api-key
  secret: {secretName: {{ .name | quote }}, defaultMode: 0440, items: [{key: {{ .key | quote }}, path: api-key}]}
{{- end }}
{{- end }}
{{- with .Values.auth.sidecarTokenSecret }}
{{- if .name }}
- name: sidecar-token
  secret: {secretName: {{ .name | quote }}, defaultMode: 0440, items: [{key: {{ .key | quote }}, path: token}]}
{{- end }}
{{- end }}
{{- with .Values.tls.secretName }}
- name: tls
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- end -}}
