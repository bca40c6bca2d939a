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

{{/* Pods with ranks. */}}
{{- define "paceline.rayPods" -}}
{{- with .Values.target }}{{ div (mul .replicas .ray.tensorParallelSize) .ray.ranksPerPod }}{{ end -}}
{{- end -}}

{{/* What a pod offers Ray: room for its ranks, as `paceline_services.target.ray_replicas` asks for it, and for no other. Ray would count
     the machine's processors, and KubeRay the limits. */}}
{{- define "paceline.rayRoom" -}}
{{- with .Values.target -}}
num-cpus: {{ mul .ray.ranksPerPod (get .engine "threads" | default 1) | quote }}
num-gpus: {{ hasPrefix "cuda" (get .engine "device" | default "cpu") | ternary .ray.ranksPerPod 0 | quote }}
{{- end -}}
{{- end -}}

{{/* The pod's shell starts Ray, and becomes the second command: the one that gets SIGTERM. Wherever the pods are, Ray
     packs: no pod is shared by two replicas, whose ranks 0 would want the same ports. */}}
{{- define "paceline.rayHead" -}}
- --ray=auto
- --replicas={{ .Values.target.replicas }}
- --tensor-parallel-size={{ .Values.target.ray.tensorParallelSize }}
- --port={{ .Values.target.port }}
{{ include "paceline.targetArguments" . }}
{{ include "paceline.workerArguments" (list . "target") }}
{{- end -}}

{{/* Environment of all that is Ray. Begins with a new line, if there is any. */}}
{{- define "paceline.rayToken" -}}
{{- with .Values.target.ray.tokenSecret -}}
{{- if .name }}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- end -}}
