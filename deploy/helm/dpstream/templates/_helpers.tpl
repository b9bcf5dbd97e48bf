{{- define "dpstream.name" -}}
{{- printf "%s-%s" .Release.Name "dpstream" | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- define "dpstream.selector" -}}
app.kubernetes.io/name: dpstream
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- define "dpstream.labels" -}}
{{ include "dpstream.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}
