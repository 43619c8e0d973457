{{- define "trainium-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "trainium-operator.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "trainium-operator.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "trainium-operator.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "trainium-operator.selector" -}}
app.kubernetes.io/name: {{ include "trainium-operator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "trainium-operator.labels" -}}
{{- include "trainium-operator.labelsAnd" (list . dict) }}
{{- end }}

{{- /* The labels of an object; the argument is a list of the context and additional labels, which take precedence. */}}
{{- define "trainium-operator.labelsAnd" -}}
{{- $more := default dict (index . 1) }}
{{- with index . 0 }}
{{- include "trainium-operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: trainium-operator
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with merge (dict) $more (default dict .Values.commonLabels) }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "trainium-operator.serviceAccount" -}}
{{- default (ternary (include "trainium-operator.fullname" .) "default" (default false .Values.serviceAccount.create)) .Values.serviceAccount.name }}
{{- end }}

{{- /* Whether the HTTPS port for readers is open. */}}
{{- define "trainium-operator.readers" -}}
{{- if or .Values.metrics.secure .Values.ui.enabled }}true{{ end }}
{{- end }}

{{- /* Secret with the certificate of the HTTPS port; empty: the coordinator's certificate. */}}
{{- define "trainium-operator.httpsSecret" -}}
{{- if .Values.https.certificateSecret }}
{{- .Values.https.certificateSecret }}
{{- else if .Values.https.issuer.name }}
{{- include "trainium-operator.fullname" . }}-https
{{- end }}
{{- end }}

{{- /* How a monitor reads over HTTPS. The name is one that the certificate has. */}}
{{- define "trainium-operator.scrape" -}}
scheme: https
tlsConfig:
  {{- $own := include "trainium-operator.httpsSecret" . }}
  {{- $service := printf "%s-metrics" (include "trainium-operator.fullname" .) }}
  serverName: {{ ternary $service (include "trainium-operator.coordinator" .) (ne $own "") }}.{{ .Release.Namespace }}.svc
  ca:
    secret:
      name: {{ default (printf "%s-tls" (include "trainium-operator.coordinator" .)) $own }}
      key: ca.crt
{{- with .Values.metrics.tokenSecret.name }}
authorization:
  credentials:
    name: {{ . }}
    key: {{ $.Values.metrics.tokenSecret.key }}
{{- end }}
{{- end }}

{{- /* Flags of the Lease's times. The operator checks them too; here a bad one is refused before a pod is created. */}}
{{- define "trainium-operator.lease" -}}
{{- with .Values.lease }}
{{- $deadline := float64 .renewDeadlineSeconds }}
{{- if gt $deadline (mulf 0.8 .durationSeconds) }}
{{- fail (printf "lease.renewDeadlineSeconds must be at most four fifths of lease.durationSeconds (%v), not %v: who lost the Lease must have stopped before another replica takes over" (mulf 0.8 .durationSeconds) $deadline) }}
{{- end }}
{{- if gt (float64 .retrySeconds) (divf $deadline 2) }}
{{- fail (printf "lease.retrySeconds must be at most half of lease.renewDeadlineSeconds (%v), not %v: one renewal that fails must not lose the Lease" (divf $deadline 2) .retrySeconds) }}
{{- end -}}
- --lease-duration={{ int .durationSeconds }}
- --lease-renew-deadline={{ .renewDeadlineSeconds }}
- --lease-retry={{ .retrySeconds }}
{{- end }}
{{- end }}

{{- /* Values that contradict each other are refused before anything is installed; the operator checks them too. */}}
{{- define "trainium-operator.taintNodes" -}}
{{- if and .Values.quarantine.taintNodes (not .Values.watchNodes) }}
{{- fail "quarantine.taintNodes needs watchNodes: the operator taints only nodes that it watches. Set watchNodes=true, or quarantine.taintNodes=false: then only the pods of TrainingJobs avoid bad nodes" }}
{{- end -}}
{{ default false .Values.quarantine.taintNodes }}
{{- end }}

{{- define "trainium-operator.coordinator" -}}
{{ include "trainium-operator.fullname" . }}-coordinator
{{- end }}

{{- define "trainium-operator.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}
{{- end }}

{{- define "trainium-operator.trainerImage" -}}
{{- default (printf "trainium-trainer:%s" .Chart.AppVersion) .Values.trainerImage }}
{{- end }}

{{- define "trainium-operator.agentImage" -}}
{{- default (printf "trainium-agent:%s" .Chart.AppVersion) .Values.agentImage }}
{{- end }}

{{- /* The served namespaces, separated by commas; empty for all. */}}
{{- define "trainium-operator.namespaces" -}}
{{- $one := list }}
{{- with .Values.watchNamespace }}{{ $one = list . }}{{ end }}
{{- concat (default list .Values.watchNamespaces) $one | uniq | join "," }}
{{- end }}

{{- /* PriorityClass of workers on idle nodes; empty if idle nodes are not used. */}}
{{- define "trainium-operator.extraPriorityClass" -}}
{{- $class := .Values.idleNodes.priorityClass -}}
{{- if $class.name -}}
{{- $class.name -}}
{{- else if $class.create -}}
{{- printf "%s-idle-nodes" (include "trainium-operator.fullname" .) -}}
{{- end }}
{{- end }}

{{- /* CEL: whether a TrainingJob controls this object and its labels say the same; the argument is the variable's name. */}}
{{- define "trainium-operator.ofAJob" -}}
has({{ . }}.metadata.ownerReferences) && has({{ . }}.metadata.labels) && 'trainium.dev/job-name' in {{ . }}.metadata.labels && {{ . }}.metadata.ownerReferences.exists(o, o.kind == 'TrainingJob' && o.apiVersion.startsWith('trainium.dev/') && has(o.controller) && o.controller && o.name == {{ . }}.metadata.labels['trainium.dev/job-name'])
{{- end }}
{{- /* CEL: whether a job wrote the object and was deleted without it, so that no controller is left (OwnerCheck). */}}
{{- define "trainium-operator.leftByAJob" -}}
has({{ . }}.metadata.labels) && 'trainium.dev/job-name' in {{ . }}.metadata.labels && has({{ . }}.metadata.annotations) && 'trainium.dev/job-uid' in {{ . }}.metadata.annotations && !(has({{ . }}.metadata.ownerReferences) && {{ . }}.metadata.ownerReferences.exists(o, has(o.controller) && o.controller))
{{- end }}
