{{- define "ovfleet.name" -}}
{{ .Release.Name | trunc 48 | trimSuffix "-" }}
{{- end }}

{{- define "ovfleet.selector" -}}
app.kubernetes.io/name: ovfleet-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
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

{{- /* The reference of an image. The argument is a list of the root context and the values of the image. */ -}}
{{- define "ovfleet.image" -}}
{{- $context := index . 0 }}{{- $image := index . 1 -}}
{{ $image.repository }}:{{ $image.tag | default $context.Chart.AppVersion }}
{{- end }}

{{- /* The permissions of the operator in each namespace that it manages. They do not allow it to read, change or delete
Secrets, to execute commands in pods, or to grant permissions that it does not have. */ -}}
{{- define "ovfleet.rules" -}}
- apiGroups: [ovfleet.dev]
  resources: [llmdeployments]
  verbs: [get, list, watch]
- apiGroups: [ovfleet.dev]
  resources: [llmdeployments/status]
  verbs: [patch]
# Needed for ownerReferences with blockOwnerDeletion.
- apiGroups: [ovfleet.dev]
  resources: [llmdeployments/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [configmaps, persistentvolumeclaims, serviceaccounts, services]
  verbs: [get, list, watch, create, patch, delete]
# The operator creates the Secret with the replica token and never reads it.
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
# The operator sets the readiness gate in the status of pods.
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
# The operator grants this permission to the routers, so it needs the permission itself.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
# Kubernetes reports only in events why a Job cannot create a pod and why a pod cannot mount a volume.
- apiGroups: [""]
  resources: [events]
  verbs: [list, watch]
{{- end }}
