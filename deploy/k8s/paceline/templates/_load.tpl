{{/* A PromQL selector of the series of one component of this release. Takes (list $ component). */}}
{{- define "paceline.series" -}}
{{- $ := index . 0 -}}
{namespace="{{ $.Release.Namespace }}",service="{{ include "paceline.name" $ }}-{{ index . 1 }}"}
{{- end -}}

{{/* PromQL for the number of requests of a component. Autoscalers use it. */}}
{{- define "paceline.gatewayLoad" -}}
{{- $its := include "paceline.series" (list . "gateway") -}}
sum(paceline_requests_running{{ $its }})
{{- end -}}

{{- define "paceline.targetLoad" -}}
{{- $its := include "paceline.series" (list . "target") -}}
sum(paceline_num_requests_running{{ $its }}) + sum(paceline_num_requests_waiting{{ $its }})
{{- end -}}

{{/* The load is zero while drafting does not pay. The acceptance of the first guess decides: unlike the depth of the
     trees, it does not depend on the number of drafts. */}}
{{- define "paceline.draftLoad" -}}
sum(paceline_draft_open_requests{{ include "paceline.series" (list . "draft") }}) * ({{ include "paceline.firstGuesses" . }} >= bool {{ .Values.draft.autoscaling.minAcceptance }} or vector(1))
{{- end -}}

{{- define "paceline.firstGuesses" -}}
{{- $its := include "paceline.series" (list . "target") -}}
{{- $first := $its | replace "}" ",position=\"0\"}" -}}
sum(rate(paceline_spec_decode_num_accepted_tokens_per_pos_total{{ $first }}[5m])) / (sum(rate(paceline_spec_decode_num_drafts_total{{ $its }}[5m])) > 0)
{{- end -}}

{{/* A reference to the workload of a component. Takes (list $ component). */}}
{{- define "paceline.workload" -}}
apiVersion: apps/v1
kind: {{ eq (index . 1) "target" | ternary "StatefulSet" "Deployment" }}
name: {{ include "paceline.name" (index . 0) }}-{{ index . 1 }}
{{- end -}}

{{/* The spec of a HorizontalPodAutoscaler. Takes (list $ component). */}}
{{- define "paceline.horizontal" -}}
{{- $ := index . 0 -}}
{{- $component := index . 1 -}}
{{- $its := (get $.Values $component).autoscaling -}}
scaleTargetRef:
  {{- include "paceline.workload" . | nindent 2 }}
minReplicas: {{ $its.minReplicas }}
maxReplicas: {{ $its.maxReplicas }}
behavior:
  scaleDown:
    stabilizationWindowSeconds: {{ $.Values.autoscaling.scaleDownSeconds }}
metrics:
  - type: External
    external:
      metric:
        name: paceline:{{ $component }}_load
        selector:
          matchLabels: {release: {{ $.Release.Name }}}
      target:
        type: AverageValue
        averageValue: {{ $its.requestsPerReplica | quote }}
{{- end -}}

{{/* The spec of a ScaledObject. Takes (list $ component). */}}
{{- define "paceline.scaled" -}}
{{- $ := index . 0 -}}
{{- $component := index . 1 -}}
{{- $its := (get $.Values $component).autoscaling -}}
scaleTargetRef:
  {{- include "paceline.workload" . | nindent 2 }}
minReplicaCount: {{ $its.minReplicas }}
maxReplicaCount: {{ $its.maxReplicas }}
advanced:
  horizontalPodAutoscalerConfig:
    behavior:
      scaleDown:
        stabilizationWindowSeconds: {{ $.Values.autoscaling.scaleDownSeconds }}
triggers:
  - type: prometheus
    metricType: AverageValue
    metadata:
      serverAddress: {{ $.Values.autoscaling.prometheusUrl }}
      query: {{ include (printf "paceline.%sLoad" $component) $ | quote }}
      threshold: {{ $its.requestsPerReplica | quote }}
{{- end -}}
