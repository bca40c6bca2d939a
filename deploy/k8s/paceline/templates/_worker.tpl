{{/* The container of a target or a draft. Takes (list $ component own-arguments). */}}
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
    {{- include "paceline.environment" $ | nindent 4 }}
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

{{/* Options that do not depend on where a worker runs. Takes (list $ component). */}}
{{- define "paceline.workerArguments" -}}
{{- $ := index . 0 -}}
{{- $its := get $.Values (index . 1) -}}
- --metrics-port={{ $its.metricsPort }}
- --log-level={{ $.Values.logLevel }}
{{- if $.Values.model.trustRemoteCode }}
- --trust-remote-code
{{- end }}
{{- include "paceline.tlsArguments" $its | nindent 0 }}
- {{ printf "--speculative-config=%s" (toJson $.Values.speculation) | quote }}
- {{ printf "--engine-config=%s" (toJson $its.engine) | quote }}
{{- end -}}

{{/* A worker listens once its model is loaded, and says NOT_SERVING from the moment it drains: not ready, but alive.
     Kubernetes asks a pod that it ends for its readiness only. The kubelet has no certificate: with mutual TLS it asks
     the port of the metrics, which is there once the model is loaded. */}}
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
{{- end -}}
