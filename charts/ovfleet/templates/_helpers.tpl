{{- define "ovfleet.name" -}}
{{ .Release.Name | trunc 48 | trimSuffix "-" }}
{{- end }}

{{- define "ovfleet.selector" -}}
app.kubernetes.io/name: ovfleet-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ovfleet.labels" -}}
{{ include "ovfleet.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "ovfleet.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "ovfleet.name" .) }}
{{- end }}

{{- /* image: a list of the context and one of the image values */ -}}
{{- define "ovfleet.image" -}}
{{- $context := index . 0 }}{{- $image := index . 1 -}}
{{ $image.repository }}:{{ $image.tag | default $context.Chart.AppVersion }}
{{- end }}

{{- /* What the operator may do in each namespace it watches. It cannot read, change or delete Secrets, cannot exec into
pods and grants no more than it has. */ -}}
{{- define "ovfleet.rules" -}}
- apiGroups: [ovfleet.dev]
  resources: [llmdeployments]
  verbs: [get, list, watch]
- apiGroups: [ovfleet.dev]
  resources: [llmdeployments/status]
  verbs: [get, patch]
# To be the owner whose deletion waits for what it owns.
- apiGroups: [ovfleet.dev]
  resources: [llmdeployments/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [configmaps, persistentvolumeclaims, serviceaccounts, services]
  verbs: [get, list, watch, create, patch, delete]
# The replica token, which is not read again once it was created.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [servicemonitors]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
# The readiness gate.
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
# Nobody can grant what they do not have: this is for the routers.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
# Why a Job creates no pod and a pod mounts no volume is reported in events only.
- apiGroups: [""]
  resources: [events]
  verbs: [list, watch]
{{- end }}
