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
     neither the manifest nor the command line, which other processes on the node can read, contains a secret. */}}
{{- define "paceline.environment" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: HOME
  value: /tmp
{{- with .Values.redis }}
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
- name: tmp
  mountPath: /tmp
{{- include "paceline.secretMounts" (get $.Values (index . 1)) }}
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
- name: tmp
  emptyDir: {}
{{- include "paceline.secretVolumes" (get $.Values (index . 1)) }}
{{- with $.Values.model.claimName }}
- name: models
  persistentVolumeClaim:
    claimName: {{ . }}
    readOnly: true
{{- end }}
{{- end -}}
