{{/* One alert. Takes (list name minutes severity expression summary). docs/operations.md has a section for each alert. */}}
{{- define "paceline.alert" -}}
- alert: {{ index . 0 }}
  expr: {{ index . 3 | quote }}
  for: {{ index . 1 }}m
  labels:
    severity: {{ index . 2 }}
  annotations:
    summary: {{ index . 4 | quote }}
{{- end -}}
