{{/* Labels and annotations of a component's pods. Takes (list $ component annotations). */}}
{{- define "paceline.podMetadata" -}}
labels:
  {{- include "paceline.selector" . | nindent 2 }}
{{- with index . 2 }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Fields that all pods share: placement, and the pod security standard "restricted". Takes (list $ component user). */}}
{{- define "paceline.pod" -}}
{{- $ := index . 0 -}}
{{- $component := index . 1 -}}
{{- $its := get $.Values $component -}}
serviceAccountName: {{ include "paceline.name" $ }}-services
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ index . 2 }}
  runAsGroup: {{ index . 2 }}
  fsGroup: {{ index . 2 }}
  seccompProfile:
    type: RuntimeDefault
{{- with $its.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $its.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $its.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $its.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and (eq $component "target") $.Values.target.ray.enabled (eq $.Values.target.ray.placement "pack") }}
affinity:
  podAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "paceline.selector" (list $ $component) | nindent 14 }}
{{- else }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "paceline.selector" (list $ $component) | nindent 8 }}
{{- end }}
{{- end -}}

{{- define "paceline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The user id of the images. */}}
{{- define "paceline.user" -}}10001{{- end -}}

{{/* Environment of the services: the pod's name and address, and the URL of Redis. Kubernetes expands $(...). So
     neither the manifest nor the command line, which other processes on the node can read, contains a secret. Without a
     claim for them, caches are below HOME or /tmp. The component's `env` comes last and may change the paths. Takes
     (list $ component). */}}
{{- define "paceline.environment" -}}
{{- $ := index . 0 -}}
{{- $its := get $.Values (index . 1) -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- with $.Values.redis }}
{{- if not .enabled }}
- name: PACELINE_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ .external.urlSecret.name }}, key: {{ .external.urlSecret.key }}}
{{- else }}
{{- if .passwordSecret.name }}
{{- include "paceline.redisPassword" $ | nindent 0 }}
{{- end }}
- name: PACELINE_REDIS_URL
  value: redis://{{ if .passwordSecret.name }}:$(REDIS_PASSWORD)@{{ end }}{{ include "paceline.name" $ }}-redis:{{ .port }}/0
{{- end }}
{{- end }}
{{- $variables := dict "HOME" "/tmp" }}
{{- if $its.cacheClaimName }}
{{- $variables = dict "HOME" "/tmp" "VLLM_CACHE_ROOT" "/cache/vllm" "TORCHINDUCTOR_CACHE_DIR" "/cache/inductor" "TRITON_CACHE_DIR" "/cache/triton" }}
{{- end }}
{{- range $name, $value := $its.env }}
{{- $_ := set $variables $name $value }}
{{- end }}
{{- range $name, $value := $variables }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{- define "paceline.redisPassword" -}}
{{- with .Values.redis.passwordSecret -}}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
{{- end -}}
{{- end -}}

{{/* Volume mounts. The root file system is read only. Checkpoints come from a claim, certificates from Secrets. Takes
     (list $ component). */}}
{{- define "paceline.mounts" -}}
{{- $ := index . 0 -}}
{{- $its := get $.Values (index . 1) -}}
- name: tmp
  mountPath: /tmp
{{- if $its.sharedMemory }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- if $its.cacheClaimName }}
- name: cache
  mountPath: /cache
{{- end }}
{{- include "paceline.secretMounts" $its }}
{{- with $.Values.model }}
{{- if .claimName }}
- name: models
  mountPath: {{ .mountPath }}
  readOnly: true
{{- end }}
{{- end }}
{{- end -}}

{{- define "paceline.volumes" -}}
{{- $ := index . 0 -}}
{{- $its := get $.Values (index . 1) -}}
- name: tmp
  emptyDir: {}
{{- with $its.sharedMemory }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
{{- end }}
{{- with $its.cacheClaimName }}
- name: cache
  persistentVolumeClaim: {claimName: {{ . }}}
{{- end }}
{{- include "paceline.secretVolumes" $its }}
{{- with $.Values.model.claimName }}
- name: models
  persistentVolumeClaim:
    claimName: {{ . }}
    readOnly: true
{{- end }}
{{- end -}}
