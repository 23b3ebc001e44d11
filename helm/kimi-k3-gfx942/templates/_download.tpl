{{/* What the download's Job does. */}}
{{- define "kimi-k3.downloadSpec" -}}
{{- $ := . -}}
{{- $facts := include "kimi-k3.facts" . | fromJson -}}
{{- with .Values.model.download -}}
# A hub that is away for a day is no reason to give up: the deadline is.
backoffLimit: 10000
activeDeadlineSeconds: {{ int .timeoutSeconds }}
template:
  metadata:
    labels:
      {{- include "kimi-k3.selector" $ | nindent 6 }}
      app.kubernetes.io/component: download
  spec:
    restartPolicy: OnFailure
    serviceAccountName: {{ include "kimi-k3.serviceAccount" $ | quote }}
    automountServiceAccountToken: false
    enableServiceLinks: false
    {{- include "kimi-k3.pullSecrets" $ | nindent 4 }}
    {{- with $.Values.scheduling.tolerations }}
    tolerations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- if and (not (has "ReadWriteMany" .accessModes)) (int $.Values.replicas) }}
    # Where the engine is, which waits there: its claim is of one node.
    affinity:
      podAffinity:
        requiredDuringSchedulingIgnoredDuringExecution:
          - topologyKey: kubernetes.io/hostname
            labelSelector:
              matchLabels:
                {{- include "kimi-k3.engineSelector" $ | nindent 16 }}
    {{- end }}
    securityContext:
      {{- include "kimi-k3.podSecurity" $ | nindent 6 }}
    containers:
      - name: download
        image: {{ include "kimi-k3.image" (list $ "engine") }}
        {{- with $.Values.image.pullPolicy }}
        imagePullPolicy: {{ . }}
        {{- end }}
        args:
          - checkpoint
          - download
          - {{ .repository | quote }}
          - {{ $facts.checkpoint | quote }}
          - --revision={{ .revision }}
        env:
          {{- with .endpoint }}
          - {name: HF_ENDPOINT, value: {{ . | quote }}}
          {{- end }}
          {{- if .tokenSecret.name }}
          - {name: HF_TOKEN_PATH, value: /run/secrets/hub/token}
          {{- end }}
          - {name: HF_HUB_DISABLE_TELEMETRY, value: "1"}
          {{- range $name, $value := .env }}
          - {name: {{ $name }}, value: {{ include "kimi-k3.text" $value | quote }}}
          {{- end }}
        resources:
          requests: {cpu: "1", memory: 2Gi}
          limits: {memory: 8Gi}
        securityContext:
          {{- include "kimi-k3.containerSecurity" $ | nindent 10 }}
        volumeMounts:
          - {name: model, mountPath: /models}
          - {name: cache, mountPath: /cache}
          - {name: tmp, mountPath: /tmp}
          {{- if .tokenSecret.name }}
          - {name: token, mountPath: /run/secrets/hub, readOnly: true}
          {{- end }}
    volumes:
      - name: model
        persistentVolumeClaim: {claimName: {{ include "kimi-k3.fullname" $ }}-model}
      - name: cache
        emptyDir: {sizeLimit: 1Gi}
      - name: tmp
        emptyDir: {sizeLimit: 1Gi}
      {{- if .tokenSecret.name }}
      - name: token
        secret: {secretName: {{ .tokenSecret.name | quote }}, defaultMode: 0440, items: [{key: {{ .tokenSecret.key | quote }}, path: token}]}
      {{- end }}
{{- end -}}
{{- end -}}
