{{/* Peers of a rule: the pods of one component, in this release and in networkPolicy.otherReleases. Takes
     (list $ component). */}}
{{- define "paceline.peer" -}}
{{- include "paceline.ownPeer" . }}
{{- include "paceline.otherPeers" . }}
{{- end -}}

{{- define "paceline.ownPeer" -}}
- podSelector:
    matchLabels:
      {{- include "paceline.selector" . | nindent 6 }}
{{- end -}}

{{/* The same component's pods in other releases. Each peer begins with a new line, because it follows another peer. */}}
{{- define "paceline.otherPeers" -}}
{{- $ := index . 0 -}}
{{- $component := index . 1 -}}
{{- range $.Values.networkPolicy.otherReleases }}
- podSelector:
    matchLabels:
      app.kubernetes.io/name: {{ $.Chart.Name }}
      app.kubernetes.io/instance: {{ . }}
      app.kubernetes.io/component: {{ $component }}
{{- end }}
{{- end -}}

{{- define "paceline.namespaces" -}}
- namespaceSelector:
    matchExpressions:
      - key: kubernetes.io/metadata.name
        operator: In
        values:
          {{- toYaml . | nindent 10 }}
{{- end -}}

{{/* Lets Prometheus read the metrics. Takes (list $ port). */}}
{{- define "paceline.fromMonitoring" -}}
{{- with (index . 0).Values.networkPolicy.monitoringNamespaces }}
- from:
    {{- include "paceline.namespaces" . | nindent 4 }}
  ports:
    - {port: {{ index $ 1 }}}
{{- end }}
{{- end -}}

{{/* Lets a service reach DNS, Redis and the collector of traces, which all services use. */}}
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
    {{- include "paceline.otherPeers" (list $ "redis") | indent 4 }}
    {{- end }}
  ports:
    - {port: {{ .port }}}
{{- end }}
{{- if and .Values.tracing.otlpEndpoint .Values.networkPolicy.monitoringNamespaces }}
- to:
    {{- include "paceline.namespaces" .Values.networkPolicy.monitoringNamespaces | nindent 4 }}
  ports:
    - {port: {{ include "paceline.collectorPort" .Values.tracing }}}
{{- end }}
{{- end -}}

{{- define "paceline.collectorPort" -}}
{{- $url := urlParse .otlpEndpoint -}}
{{- $parts := splitList ":" (get $url "host") -}}
{{- gt (len $parts) 1 | ternary (last $parts) (eq (get $url "scheme") "https" | ternary "443" "80") -}}
{{- end -}}

{{/* The pods of the Ray cluster. Ray and the ranks choose their ports, so the rule allows all ports. */}}
{{- define "paceline.rayPeers" -}}
{{ include "paceline.ownPeer" (list . "ray") }}
{{ include "paceline.ownPeer" (list . "target") }}
{{- end -}}
