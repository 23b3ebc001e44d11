{{/*
What no schema can say: values that do not go together. Each message says what is wrong and what to do.
*/}}
{{- define "kimi-k3.checks" -}}
{{- $facts := include "kimi-k3.facts" . | fromJson -}}
{{- $model := .Values.model -}}

{{- $pods := mul (int .Values.replicas) (int $facts.nodes) | int -}}
{{- $fewer := ternary "replicas=1" "a profile of one node" (eq (int $facts.nodes) 1) -}}

{{- $name := include "kimi-k3.fullname" . -}}
{{- if regexMatch "-(sidecar|worker)$" $name -}}
{{- fail (printf "fullnameOverride: the objects are called %s, and by such an end alerts know sidecars and other nodes; give a name that ends otherwise" $name) -}}
{{- end -}}

{{- if $facts.notStartable -}}
{{- fail (printf "profile: %s %s; use another profile" .Values.profile $facts.notStartable) -}}
{{- end -}}

{{- if and (eq $facts.weights "int4") (not .Values.weights.acceptLossy) -}}
{{- fail (printf "weights.acceptLossy: profile %s serves the experts as int4, which changes them; set weights.acceptLossy=true to consent, or weights.format=mxfp4 for exact weights, which are slower" .Values.profile) -}}
{{- end -}}

{{- if and .Values.weights.scaleRule (ne $facts.weights "int4") -}}
{{- fail (printf "weights.scaleRule: %s has no effect on %s, which is served as it is; leave it out, or set weights.format=int4" .Values.weights.scaleRule $facts.weights) -}}
{{- end -}}

{{- $sources := dict
      "model.existingClaim" $model.existingClaim
      "model.hostPath" $model.hostPath
      "model.inImage" $model.inImage
      "model.download.enabled" (ternary "yes" "" $model.download.enabled) -}}
{{- $given := list -}}
{{- range $name, $value := $sources -}}{{- if $value -}}{{- $given = append $given $name -}}{{- end -}}{{- end -}}
{{- if not $given -}}
{{- fail "model: nothing says where the checkpoint is; set one of model.existingClaim, model.hostPath, model.download.enabled" -}}
{{- else if gt (len $given) 1 -}}
{{- fail (printf "model: the checkpoint has %d sources, %s; leave one" (len $given) ($given | sortAlpha | join " and ")) -}}
{{- end -}}
{{- if and $model.download.enabled (not $model.download.revision) -}}
{{- fail "model.download.revision: is empty, so what would be served is not known; give the commit of the repository" -}}
{{- end -}}
{{- if and $model.download.enabled (has "ReadWriteOncePod" $model.download.accessModes) -}}
{{- fail "model.download.accessModes: ReadWriteOncePod gives the volume to one pod, and both the Job and the engine need it; use ReadWriteOnce or ReadWriteMany" -}}
{{- end -}}

{{- /* They have values of their own, which consent, probes and tests follow. */}}
{{- $own := dict
      "weights" "weights.format"
      "scale-rule" "weights.scaleRule"
      "start-timeout" "startup.timeoutSeconds"
      "drain-timeout" "shutdown.drainSeconds"
      "readiness-delay" "shutdown.readinessDelaySeconds" -}}
{{- range $name, $_ := .Values.overrides -}}
{{- if hasKey $own $name -}}
{{- fail (printf "overrides.%s: the chart has a value for it, on which more depends; set %s" $name (get $own $name)) -}}
{{- else if eq $name "nodes" -}}
{{- fail "overrides.nodes: how many nodes there are is the profile's; choose another profile" -}}
{{- else if not (has $name $facts.settings) -}}
{{- fail (printf "overrides.%s: is not known; `kimi-k3 plan DIRECTORY --set %s=VALUE` names the nearest" $name $name) -}}
{{- end -}}
{{- end -}}

{{- range $place, $given := dict "engine.env" .Values.engine.env "model.download.env" $model.download.env -}}
{{- range $name, $_ := $given -}}
{{- if hasPrefix "KIMI_K3_" $name -}}
{{- fail (printf "%s.%s: is the program's own, and the chart and the sidecar would not know of it; leave it out, and set the value of the chart that is for it" $place $name) -}}
{{- else if regexMatch "(^|_)(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)$" $name -}}
{{- fail (printf "%s.%s: sounds like a secret, and here everybody could read it who may see the pods; put it into a Secret, and name that in auth.apiKeySecret or model.download.tokenSecret" $place $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- range $place, $given := dict
      "monitoring.serviceMonitor.additionalLabels" .Values.monitoring.serviceMonitor.additionalLabels
      "monitoring.rules.additionalLabels" .Values.monitoring.rules.additionalLabels
      "monitoring.dashboards.labels" .Values.monitoring.dashboards.labels -}}
{{- range $name, $_ := $given -}}
{{- if or (hasKey (include "kimi-k3.labels" $ | fromYaml) $name) (eq $name "app.kubernetes.io/component") -}}
{{- fail (printf "%s.%s: is set by the chart, and an object has a label once; leave it out" $place $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if hasKey .Values.multiNode.podAnnotations "kubectl.kubernetes.io/default-container" -}}
{{- fail "multiNode.podAnnotations.kubectl.kubernetes.io/default-container: is set by the chart; leave it out" -}}
{{- end -}}

{{- $several := .Values.multiNode -}}
{{- if eq (int $facts.nodes) 1 -}}
{{- range $name, $value := $several -}}
{{- if $value -}}
{{- fail (printf "multiNode.%s: profile %s has one node; leave it out, or use a profile for several" $name $.Values.profile) -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- if hasKey $several.rdmaResources .Values.engine.gpuResource -}}
{{- fail (printf "multiNode.rdmaResources: %s is the profile's; leave it out" .Values.engine.gpuResource) -}}
{{- end -}}
{{- $ours := list "VLLM_HOST_IP" "KIMI_K3_SIDECAR_TOKEN_FILE" "LWS_LEADER_ADDRESS" "LWS_GROUP_SIZE" "LWS_WORKER_INDEX" -}}
{{- if $several.networkInterface -}}{{- $ours = concat $ours (list "NCCL_SOCKET_IFNAME" "GLOO_SOCKET_IFNAME") -}}{{- end -}}
{{- range $name, $_ := .Values.engine.env -}}
{{- if has $name $ours -}}
{{- fail (printf "engine.env.%s: is set by the chart where there are several nodes; leave it out" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- if gt (int $facts.nodes) 1 -}}
{{- if not .Values.auth.sidecarTokenSecret.name -}}
{{- fail (printf "auth.sidecarTokenSecret.name: is empty, and the %d nodes of profile %s know each other by that token; make one: kubectl create secret generic kimi-k3-sidecar --from-literal=token=$(openssl rand -hex 32)" (int $facts.nodes) .Values.profile) -}}
{{- end -}}
{{- include "kimi-k3.needs" (list . "leaderworkerset.x-k8s.io/v1" (printf "profile: %s has %d nodes, and" .Values.profile (int $facts.nodes)) "LeaderWorkerSet" "use a profile of one node") -}}
{{- end -}}

{{- if gt $pods 1 -}}
{{- $claims := dict -}}
{{- if $model.download.enabled -}}{{- $_ := set $claims "model.download.accessModes" $model.download.accessModes -}}{{- end -}}
{{- range $name := list "state" "cache" -}}
{{- $volume := index $.Values.storage $name -}}
{{- if $volume.persistent -}}
{{- if eq $name "state" -}}
{{- fail "storage.state.persistent: the journal is one pod's, and several would write into one; set it to false, or use one replica and one node" -}}
{{- end -}}
{{- $_ := set $claims (printf "storage.%s.accessModes" $name) $volume.accessModes -}}
{{- end -}}
{{- end -}}
{{- range $name, $modes := $claims -}}
{{- if not (or (has "ReadWriteMany" $modes) (has "ReadOnlyMany" $modes)) -}}
{{- fail (printf "%s: [%s] attaches the volume to one node, and %d pods need it on several; use ReadWriteMany, or %s" $name (join ", " $modes) $pods $fewer) -}}
{{- end -}}
{{- end -}}
{{- if $model.existingClaim -}}
{{- $claim := lookup "v1" "PersistentVolumeClaim" .Release.Namespace $model.existingClaim -}}
{{- if $claim -}}
{{- $modes := $claim.spec.accessModes -}}
{{- if not (or (has "ReadWriteMany" $modes) (has "ReadOnlyMany" $modes)) -}}
{{- fail (printf "model.existingClaim: %s is [%s], which one node attaches, and %d pods need it on several; use a claim with ReadWriteMany, or %s" $model.existingClaim (join ", " $modes) $pods $fewer) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- if lt (int $facts.grace) (int $facts.graceNeeded) -}}
{{- fail (printf "shutdown.graceSeconds: %d is less than the %d s that a readiness delay of %d s, a drain of %d s and the end of the processes take, so requests would be killed; leave it out, or shorten shutdown.drainSeconds" (int $facts.grace) (int $facts.graceNeeded) (int $facts.delay) (int $facts.drain)) -}}
{{- end -}}
{{- if lt (int $facts.probe) (int $facts.probeNeeded) -}}
{{- fail (printf "startup.probeSeconds: %d is less than the %d s after which the engine itself gives up, so a start would be killed without a reason; leave it out, or lower startup.timeoutSeconds" (int $facts.probe) (int $facts.probeNeeded)) -}}
{{- end -}}

{{- $limit := dig "limits" "memory" "" .Values.engine.resources -}}
{{- if $limit -}}
{{- if le (include "kimi-k3.bytes" $limit | int64) (include "kimi-k3.bytes" .Values.engine.sharedMemory | int64) -}}
{{- fail (printf "engine.resources.limits.memory: %s does not hold engine.sharedMemory (%s), which counts in it; raise it" (toString $limit) .Values.engine.sharedMemory) -}}
{{- end -}}
{{- end -}}
{{- range $place, $given := dict
      "engine.resources" .Values.engine.resources
      "sidecar.resources" .Values.sidecar.resources
      "verify.resources" .Values.verify.resources -}}
{{- $limit := dig "limits" "memory" "" $given -}}
{{- $request := dig "requests" "memory" "" $given -}}
{{- if and $limit $request -}}
{{- if lt (include "kimi-k3.bytes" $limit | int64) (include "kimi-k3.bytes" $request | int64) -}}
{{- fail (printf "%s.limits.memory: %s is less than the request, %s; change both" $place (toString $limit) (toString $request)) -}}
{{- end -}}
{{- end -}}
{{- range $kind := list "requests" "limits" -}}
{{- if hasKey (index $given $kind | default dict) $.Values.engine.gpuResource -}}
{{- fail (printf "%s.%s: %s is the profile's; leave it out" $place $kind $.Values.engine.gpuResource) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- range $name := list "path" "hostPath" "inImage" -}}
{{- if regexMatch "(^|/)\\.\\.(/|$)" (index $model $name) -}}
{{- fail (printf "model.%s: %s leaves its directory; write it without .." $name (index $model $name)) -}}
{{- end -}}
{{- end -}}

{{- $results := .Values.verify.results -}}
{{- if regexMatch "(^|/)\\.\\.(/|$)" $results.path -}}
{{- fail (printf "verify.results.path: %s leaves its claim; write it without .." $results.path) -}}
{{- end -}}
{{- if and $results.path (not $results.existingClaim) -}}
{{- fail "verify.results.path: is a directory of verify.results.existingClaim, which is empty; name the claim, or leave it out" -}}
{{- end -}}

{{- $open := false -}}
{{- range .Values.networkPolicy.clients -}}{{- if .ipBlock -}}{{- $open = true -}}{{- end -}}{{- end -}}
{{- if and (ne .Values.service.type "ClusterIP") .Values.networkPolicy.enabled (not $open) -}}
{{- fail (printf "service.type: %s brings clients from outside, and networkPolicy.clients lets nobody in by address; add {ipBlock: {cidr: ...}} there" .Values.service.type) -}}
{{- end -}}

{{- if and (eq .Values.scheduling.gpuNodes "product-name") (not .Values.scheduling.productNames) -}}
{{- fail "scheduling.productNames: is empty, and scheduling.gpuNodes is product-name; give what `kubectl get nodes -L amd.com/gpu.product-name` shows" -}}
{{- end -}}

{{- $gateway := .Values.gateway -}}
{{- if $gateway.httpRoute.enabled -}}
{{- if not $gateway.httpRoute.parentRefs -}}
{{- fail "gateway.httpRoute.parentRefs: is empty; name the Gateway that the route belongs to" -}}
{{- end -}}
{{- if .Values.tls.secretName -}}
{{- fail "gateway.httpRoute.enabled: a route speaks plain HTTP to the pods, and tls.secretName makes them expect TLS; leave one out, and let the gateway end TLS" -}}
{{- end -}}
{{- include "kimi-k3.needs" (list . "gateway.networking.k8s.io/v1" "gateway.httpRoute.enabled:" "the Gateway API" "set it to false") -}}
{{- end -}}
{{- if $gateway.inferencePool.enabled -}}
{{- if .Values.tls.secretName -}}
{{- fail "gateway.inferencePool.enabled: a gateway speaks plain HTTP to the pods, and tls.secretName makes them expect TLS; leave one out, and let the gateway end TLS" -}}
{{- end -}}
{{- if not $gateway.inferencePool.endpointPicker.name -}}
{{- fail "gateway.inferencePool.endpointPicker.name: is empty; name the Service of the endpoint picker" -}}
{{- end -}}
{{- include "kimi-k3.needs" (list . "inference.networking.k8s.io/v1" "gateway.inferencePool.enabled:" "the Gateway API Inference Extension" "set it to false") -}}
{{- end -}}
{{- end -}}

{{/* What was asked for by name must not be left out silently. */}}
{{- define "kimi-k3.needs" -}}
{{- $root := index . 0 -}}
{{- if not ($root.Capabilities.APIVersions.Has (index . 1)) -}}
{{- fail (printf "%s this cluster has no %s (%s); install it, or %s (`helm template` is told what there is by --api-versions %s)" (index . 2) (index . 3) (index . 1) (index . 4) (index . 1)) -}}
{{- end -}}
{{- end -}}
