{{/* The container of a target or a draft. Takes (list $ component arguments), with the component's own arguments. */}}
{{- define "paceline.worker" -}}
{{- $ := index . 0 -}}
{{- $component := index . 1 -}}
{{- $its := get $.Values $component -}}
- name: {{ $component }}
  image: {{ include "paceline.image" (list $ $component) }}
  imagePullPolicy: {{ $.Values.images.pullPolicy }}
  args:
    - {{ $component }}
    {{- index . 2 | nindent 4 }}
    - --host=0.0.0.0
    - --port={{ $its.port }}
    - --advertise=$(POD_IP):{{ $its.port }}
    - --worker-id=$(POD_NAME)
    {{- include "paceline.workerArguments" . | nindent 4 }}
  env:
    {{- include "paceline.environment" (list $ $component) | nindent 4 }}
  ports:
    - {name: grpc, containerPort: {{ $its.port }}}
    - {name: metrics, containerPort: {{ $its.metricsPort }}}
  {{- include "paceline.workerProbes" $its | nindent 2 }}
  resources:
    {{- toYaml $its.resources | nindent 4 }}
  securityContext:
    {{- include "paceline.containerSecurity" $ | nindent 4 }}
  volumeMounts:
    {{- include "paceline.mounts" (list $ $component) | nindent 4 }}
{{- end -}}

{{/* Options that do not depend on a worker's pod. Takes (list $ component). */}}
{{- define "paceline.workerArguments" -}}
{{- $ := index . 0 -}}
{{- $its := get $.Values (index . 1) -}}
- --metrics-port={{ $its.metricsPort }}
- --log-level={{ $.Values.logLevel }}
{{- with $.Values.tracing.otlpEndpoint }}
- --otlp-traces-endpoint={{ . }}
{{- end }}
{{- if $.Values.model.trustRemoteCode }}
- --trust-remote-code
{{- end }}
{{- include "paceline.tlsArguments" $its | nindent 0 }}
- {{ printf "--speculative-config=%s" (toJson $.Values.speculation) | quote }}
- {{ printf "--engine-config=%s" (toJson $its.engine) | quote }}
{{- end -}}

{{/* Probes of a worker. A worker listens after it has loaded its model. While it drains, it answers NOT_SERVING: it is
     alive, but not ready. Kubernetes probes a terminating pod only for readiness. With mutual TLS, the kubelet has no
     certificate for gRPC, so it probes the metrics port, which also opens after the model is loaded. */}}
{{- define "paceline.workerProbes" -}}
{{- $live := printf "grpc: {port: %v}" .port -}}
{{- $ready := $live -}}
{{- if .tlsSecret -}}
{{- $live = "httpGet: {path: /metrics, port: metrics}" -}}
{{- $ready = "httpGet: {path: /health, port: metrics}" -}}
{{- end -}}
startupProbe:
  {{ $ready }}
  periodSeconds: 5
  failureThreshold: {{ max 1 (div .startupSeconds 5) }}
livenessProbe:
  {{ $live }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  {{ $ready }}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}

{{- define "paceline.targetArguments" -}}
- --model={{ .Values.model.path }}
- --served-model-name={{ include "paceline.servedName" . }}
- --drain-s={{ .Values.target.drainSeconds }}
- --hang-s={{ .Values.target.hangSeconds }}
{{- range $key, $value := .Values.target.labels }}
- --labels={{ $key }}={{ $value }}
{{- end }}
{{- with .Values.target.vllm }}
{{- if .enabled }}
- --engine=vllm
- {{ printf "--vllm-options=%s" (dict "engine_args" .engineArgs "python" (.python | default nil) | toJson) | quote }}
{{- end }}
{{- end }}
{{- end -}}
