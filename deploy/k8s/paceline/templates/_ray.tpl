{{/* Ports of Ray that probes and policies have to know; all others it chooses. */}}
{{- define "paceline.rayPort" -}}6379{{- end -}}
{{- define "paceline.rayNodePort" -}}6380{{- end -}}

{{/* Probes of a Ray container: KubeRay's own would need a dashboard and wget. Takes a port. */}}
{{- define "paceline.rayProbes" -}}
livenessProbe:
  tcpSocket: {port: {{ . }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
readinessProbe:
  tcpSocket: {port: {{ . }}}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}

{{/* The pod's shell starts Ray, and becomes the second command: the one that gets SIGTERM. */}}
{{- define "paceline.rayHead" -}}
- --ray=auto
- --replicas={{ .Values.target.replicas }}
- --tensor-parallel-size={{ .Values.target.ray.tensorParallelSize }}
- --placement={{ .Values.target.ray.placement }}
{{ include "paceline.targetArguments" . }}
{{ include "paceline.workerArguments" (list . "target") }}
{{- end -}}
