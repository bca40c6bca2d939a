{{/* Peers of a rule: one component's pods. Takes (list $ component). */}}
{{- define "paceline.peer" -}}
- podSelector:
    matchLabels:
      {{- include "paceline.selector" . | nindent 6 }}
{{- end -}}

{{- define "paceline.namespaces" -}}
- namespaceSelector:
    matchExpressions:
      - key: kubernetes.io/metadata.name
        operator: In
        values:
          {{- toYaml . | nindent 10 }}
{{- end -}}

{{/* Prometheus. Takes (list $ port). */}}
{{- define "paceline.fromMonitoring" -}}
{{- with (index . 0).Values.networkPolicy.monitoringNamespaces }}
- from:
    {{- include "paceline.namespaces" . | nindent 4 }}
  ports:
    - {port: {{ index $ 1 }}}
{{- end }}
{{- end -}}

{{/* Names, and Redis: what every service asks. */}}
{{- define "paceline.toShared" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- with .Values.redis }}
- to:
    {{- if .enabled }}
    {{- include "paceline.peer" (list $ "redis") | nindent 4 }}
    {{- else }}
    - ipBlock: {cidr: {{ .external.cidr }}}
    {{- end }}
  ports:
    - {port: {{ .port }}}
{{- end }}
{{- end -}}

{{/* Where targets listen. On Ray each has a port that was free where it was placed: any. */}}
{{- define "paceline.targetPorts" -}}
ports:
  {{- with .Values.target }}
  {{- if .ray.enabled }}
  - {port: 1024, endPort: 65535}
  {{- else }}
  - {port: {{ .port }}}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* Ray's own pods: they talk on ports of Ray's choice, and ranks on others. */}}
{{- define "paceline.rayPeers" -}}
{{ include "paceline.peer" (list . "ray") }}
{{ include "paceline.peer" (list . "target") }}
{{- end -}}
