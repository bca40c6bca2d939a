{{/* Checks that the schema cannot express: values that require other values. */}}
{{- define "paceline.checks" -}}
{{- with .Values }}
{{- if not .model.path }}
{{- fail "model.path: name the model to serve, a folder under model.mountPath or one that ships, such as pydoc" }}
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
{{- if .target.ray.enabled }}
{{- include "paceline.rayChecks" .target }}
{{- end }}
{{- $withTls := list .gateway.tlsSecret .target.tlsSecret (.draft.enabled | ternary .draft.tlsSecret .target.tlsSecret) }}
{{- if and (without $withTls "") (has "" $withTls) }}
{{- fail "tlsSecret: gateway, target and draft all have one, or none has" }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Checks of a target on Ray. Takes the target's values. */}}
{{- define "paceline.rayChecks" -}}
{{- $ranks := int .ray.ranksPerPod }}
{{- if mod .ray.tensorParallelSize $ranks }}
{{- fail (printf "target.ray.ranksPerPod: %d does not divide target.ray.tensorParallelSize, %v" $ranks .ray.tensorParallelSize) }}
{{- end }}
{{- range $resource, $count := .resources.limits }}
{{- if and (hasSuffix "gpu" $resource) $count (ne (int $count) $ranks) }}
{{- fail (printf "target.resources.limits: a pod has %d ranks (target.ray.ranksPerPod), and %v of %s" $ranks $count $resource) }}
{{- end }}
{{- end }}
{{- end -}}
