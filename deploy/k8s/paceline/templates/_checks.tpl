{{/* Checks that the schema cannot express: values that require other values. */}}
{{- define "paceline.checks" -}}
{{- with .Values }}
{{- if not .model.path }}
{{- fail "model.path: name the model to serve, a folder or GGUF file under model.mountPath or one that ships, such as pydoc" }}
{{- end }}
{{- if and .draft.enabled (not .speculation) }}
{{- fail "speculation: say how the draft workers are to guess, or set draft.enabled to false" }}
{{- end }}
{{- if and (not .redis.enabled) (not .redis.external.urlSecret.name) }}
{{- fail "redis.external.urlSecret.name: name the Secret with the URL of your Redis, or set redis.enabled to true" }}
{{- end }}
{{- if and (eq .autoscaling.kind "keda") (not .autoscaling.prometheusUrl) }}
{{- fail "autoscaling.prometheusUrl: KEDA has to know where Prometheus is" }}
{{- end }}
{{- if and (ne .autoscaling.kind "none") (not .monitoring.enabled) }}
{{- fail "monitoring.enabled: autoscalers go by series that Prometheus has from the ServiceMonitor and the PrometheusRule" }}
{{- end }}
{{- range $component := list "gateway" "target" "draft" }}
{{- range $name, $_ := (get $.Values $component).env }}
{{- if or (has $name (list "POD_NAME" "POD_IP" "REDIS_PASSWORD" "PACELINE_REDIS_URL")) (hasPrefix "RAY_AUTH_" $name) }}
{{- fail (printf "%s.env: the chart itself sets %s" $component $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if .target.vllm.enabled }}
{{- include "paceline.vllmChecks" .target }}
{{- end }}
{{- if .target.ray.enabled }}
{{- include "paceline.rayChecks" .target }}
{{- end }}
{{- $withTls := list .gateway.tlsSecret .target.tlsSecret (.draft.enabled | ternary .draft.tlsSecret .target.tlsSecret) }}
{{- if and (without $withTls "") (has "" $withTls) }}
{{- fail "tlsSecret: gateway, target and draft all have one, or none has" }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Checks of a target with vLLM. Takes the target's values. The keys are those of paceline.vllm.engine_arguments. */}}
{{- define "paceline.vllmChecks" -}}
{{- $allowed := list "cpus" "device" "dtype" "enable_prefix_caching" "max_model_len" "max_num_batched_rows" "max_num_seqs" "tensor_parallel_size" "threads" "trust_remote_code" }}
{{- range $key := keys .engine | sortAlpha }}
{{- if not (has $key $allowed) }}
{{- fail (printf "target.engine: %s means nothing to vLLM; the keys for it are %s, and its own arguments go into target.vllm.engineArgs" $key (join ", " $allowed)) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Checks of a target on Ray. Takes the target's values. */}}
{{- define "paceline.rayChecks" -}}
{{- $ranks := int .ray.ranksPerPod }}
{{- $all := int (include "paceline.rayRanks" .) }}
{{- if mod $all $ranks }}
{{- fail (printf "target.ray.ranksPerPod: %d does not divide the number of ranks of a replica, %d" $ranks $all) }}
{{- end }}
{{- $onCpus := not (hasPrefix "cuda" (get .engine "device" | default "cpu")) }}
{{- if and .vllm.enabled $onCpus (ne $ranks $all) }}
{{- fail (printf "target.ray.ranksPerPod: on CPUs, vLLM's ranks are in one pod: %d" $all) }}
{{- end }}
{{- range $resource, $count := .resources.limits }}
{{- if and (hasSuffix "gpu" $resource) $count (ne (int $count) $ranks) }}
{{- fail (printf "target.resources.limits: a pod has %d ranks (target.ray.ranksPerPod), and %v of %s" $ranks $count $resource) }}
{{- end }}
{{- end }}
{{- end -}}
