{{- define "paceline.name" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels that select the pods of a component. Takes (list $ component). */}}
{{- define "paceline.selector" -}}
{{- $ := index . 0 -}}
app.kubernetes.io/name: {{ $.Chart.Name }}
app.kubernetes.io/instance: {{ $.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Name and labels of an object of a component. Takes (list $ component). */}}
{{- define "paceline.metadata" -}}
{{- $ := index . 0 -}}
name: {{ include "paceline.name" $ }}-{{ index . 1 }}
namespace: {{ $.Release.Namespace }}
labels:
  {{- include "paceline.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ $.Values.images.tag | default $.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ $.Release.Service }}
  helm.sh/chart: {{ $.Chart.Name }}-{{ $.Chart.Version }}
{{- end -}}

{{- define "paceline.image" -}}
{{- $ := index . 0 -}}
{{- $component := index . 1 -}}
{{- $withVllm := and (eq $component "target") $.Values.target.vllm.enabled -}}
{{- $name := get $.Values.images ($withVllm | ternary "vllm" $component) -}}
{{- with $.Values.images.registry }}{{ . }}/{{ end -}}
{{ $name }}:{{ $.Values.images.tag | default $.Chart.AppVersion }}
{{- end -}}

{{/* The name of a model for clients, from an object with path and servedName: of a GGUF file without its ending and the
number of its part. */}}
{{- define "paceline.nameOf" -}}
{{- .servedName | default (regexReplaceAll "(-[0-9]{5}-of-[0-9]{5})?[.]gguf$" (base .path) "") -}}
{{- end -}}

{{- define "paceline.servedName" -}}
{{- include "paceline.nameOf" .Values.model -}}
{{- end -}}
