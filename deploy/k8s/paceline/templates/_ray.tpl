{{/* Ports of Ray that the probes use. Ray chooses its other ports. */}}
{{- define "paceline.rayPort" -}}6379{{- end -}}
{{- define "paceline.rayNodePort" -}}6380{{- end -}}

{{/* Probes of a Ray container. KubeRay's own probes would need Ray's dashboard and wget. Takes a port. */}}
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

{{/* Number of ranks of a replica. Takes the target's values. */}}
{{- define "paceline.rayRanks" -}}
{{- $stages := .vllm.enabled | ternary (get .vllm.engineArgs "pipeline_parallel_size" | default 1) 1 -}}
{{- mul .ray.tensorParallelSize $stages -}}
{{- end -}}

{{/* Number of pods with ranks. */}}
{{- define "paceline.rayPods" -}}
{{- with .Values.target }}{{ div (mul .replicas (include "paceline.rayRanks" .)) .ray.ranksPerPod }}{{ end -}}
{{- end -}}

{{/* Resources that a pod offers Ray: exactly those that `paceline_services.target.ray_replicas` requests for the pod's
     ranks. Otherwise Ray would count the machine's processors, and KubeRay the pod's limits. */}}
{{- define "paceline.rayRoom" -}}
{{- with .Values.target -}}
num-cpus: {{ mul .ray.ranksPerPod (get .engine "threads" | default 1) | quote }}
num-gpus: {{ hasPrefix "cuda" (get .engine "device" | default "cpu") | ternary .ray.ranksPerPod 0 | quote }}
{{- end -}}
{{- end -}}

{{/* Arguments of `paceline target` in the head pod. Ray always packs ranks, whatever target.ray.placement is. So two
     replicas never share a pod, where their ranks 0 would need the same ports. */}}
{{- define "paceline.rayHead" -}}
- --ray=auto
- --replicas={{ .Values.target.replicas }}
- --tensor-parallel-size={{ .Values.target.ray.tensorParallelSize }}
- --port={{ .Values.target.port }}
{{ include "paceline.targetArguments" . }}
{{ include "paceline.workerArguments" (list . "target") }}
{{- end -}}

{{/* Environment of all Ray containers. The text begins with a new line if it is not empty. */}}
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
