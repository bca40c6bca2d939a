{{/* Options for mutual TLS between services. Takes a component's values. */}}
{{- define "paceline.tlsArguments" -}}
{{- if .tlsSecret -}}
- --tls-cert=/etc/paceline/tls/tls.crt
- --tls-key=/etc/paceline/tls/tls.key
- --tls-ca=/etc/paceline/tls/ca.crt
{{- end -}}
{{- end -}}

{{/* Secrets of a component, by mount folder. The chart mounts whole folders, because Kubernetes never updates a file
     that is mounted alone. */}}
{{- define "paceline.secrets" -}}
{{- $edge := get . "edgeTlsSecret" -}}
{{- $keys := get (get . "apiKeysSecret" | default dict) "name" -}}
{{- $every := dict "tls" .tlsSecret "edge" $edge "keys" $keys -}}
{{- range $folder, $secret := $every }}
{{- if $secret }}
{{ $folder }}: {{ $secret }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "paceline.secretMounts" -}}
{{- range $folder, $_ := include "paceline.secrets" . | fromYaml }}
- {name: {{ $folder }}, mountPath: /etc/paceline/{{ $folder }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "paceline.secretVolumes" -}}
{{- range $folder, $secret := include "paceline.secrets" . | fromYaml }}
- {name: {{ $folder }}, secret: {secretName: {{ $secret }}, defaultMode: 0440}}
{{- end }}
{{- end -}}
