{{- define "slotbridge.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "slotbridge.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "slotbridge.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "slotbridge.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "slotbridge.selector" -}}
app.kubernetes.io/name: {{ include "slotbridge.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "slotbridge.labels" -}}
{{ include "slotbridge.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "slotbridge.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "slotbridge.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* The Lease that elects the failover manager's leader; empty where none does. */}}
{{- define "slotbridge.lease" -}}
{{- if and .Values.failover.enabled .Values.failover.lease.enabled (gt (int .Values.failover.replicas) 1) -}}
{{- printf "%s-failover" (include "slotbridge.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* Spark's driver makes its executors' pods: its Role, its account, its Service have this name; empty in local mode. */}}
{{- define "slotbridge.spark" -}}
{{- if and .Values.tables.enabled (eq .Values.tables.spark.mode "kubernetes") -}}
{{- printf "%s-tables" (include "slotbridge.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* The account of a component that talks to Kubernetes' API, of its own where the chart makes accounts: (list . "failover") */}}
{{- define "slotbridge.ownServiceAccount" -}}
{{- $root := index . 0 -}}
{{- include "slotbridge.serviceAccount" $root -}}
{{- if $root.Values.serviceAccount.create -}}
{{- printf "-%s" (index . 1) -}}
{{- end -}}
{{- end -}}

{{/* That account, where the chart makes accounts. */}}
{{- define "slotbridge.ownAccount" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.serviceAccount.create }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "slotbridge.ownServiceAccount" . }}
  labels:
    {{- include "slotbridge.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ index . 1 }}
  {{- with $root.Values.serviceAccount.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}
{{- end -}}

{{/* The image of a component: (list . "bridge") */}}
{{- define "slotbridge.image" -}}
{{- $root := index . 0 -}}
{{- $image := $root.Values.image -}}
{{- with $image.registry }}{{ . }}/{{ end -}}
{{- printf "%s-%s:%s" $image.repository (index . 1) (default $root.Chart.AppVersion $image.tag) -}}
{{- with index $image.digests (index . 1) }}@{{ . }}{{ end -}}
{{- end -}}

{{/* What a values file must not have, told in one sentence. */}}
{{- define "slotbridge.validate" -}}
{{- $config := .Values.config -}}
{{- if not (or .Values.existingSecret .Values.bridge.existingSecret) -}}
{{- if and .Values.bridge.enabled (not (dig "conninfo" "" $config.source)) -}}
{{- fail "config.source.conninfo is missing: set it, or name in existingSecret a Secret with SLOTBRIDGE_SOURCE__CONNINFO" -}}
{{- end -}}
{{- end -}}
{{- if not (or .Values.existingSecret .Values.failover.existingSecret) -}}
{{- if and .Values.failover.enabled (not (dig "nodes" dict $config.failover)) -}}
{{- fail "config.failover.nodes is missing: set it, or name in existingSecret a Secret with SLOTBRIDGE_FAILOVER__NODES" -}}
{{- end -}}
{{- end -}}
{{- if and (or .Values.bridge.enabled .Values.tables.enabled) (not (dig "bootstrap_servers" "" $config.kafka)) -}}
{{- fail "config.kafka.bootstrap_servers is missing" -}}
{{- end -}}
{{- if and (or .Values.bridge.enabled .Values.tables.enabled) (not (dig "topic_prefix" "" $config.kafka)) -}}
{{- fail "config.kafka.topic_prefix is missing" -}}
{{- end -}}
{{- if and .Values.setup.enabled (not .Values.setup.existingSecret) -}}
{{- fail "setup.existingSecret is missing: name a Secret with SETUP_CONNINFO, a superuser's conninfo" -}}
{{- end -}}
{{- if and .Values.drill.enabled (not .Values.failover.enabled) -}}
{{- fail "drill.enabled needs failover.enabled: the drill is of the nodes in config.failover" -}}
{{- end -}}
{{- if include "slotbridge.spark" . -}}
{{- if hasKey (dig "spark_options" dict $config.tables) "spark.master" -}}
{{- fail "config.tables.spark_options has spark.master: with tables.spark.mode kubernetes the chart sets it" -}}
{{- end -}}
{{- $persistence := .Values.tables.persistence -}}
{{- if and $persistence.enabled (not $persistence.existingClaim) (not (has "ReadWriteMany" $persistence.accessModes)) -}}
{{- fail "tables.persistence.accessModes lacks ReadWriteMany: with tables.spark.mode kubernetes several pods write to the warehouse; or put it into object storage, with tables.persistence.enabled false" -}}
{{- end -}}
{{- if and (not $persistence.enabled) (not (regexMatch "^[a-z0-9]+:/" (dig "warehouse" "" $config.tables))) -}}
{{- fail "config.tables.warehouse is a folder of one pod: with tables.spark.mode kubernetes name object storage, or set tables.persistence.enabled" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.maintain.enabled (not .Values.tables.enabled) -}}
{{- fail "maintain.enabled needs tables.enabled" -}}
{{- end -}}
{{- end -}}

{{/* What several bridges of one database must not share, told in one sentence. */}}
{{- define "slotbridge.validateBridges" -}}
{{- $config := .Values.config -}}
{{- $all := dict "config" $config -}}
{{- range $name, $differs := .Values.bridges -}}
{{- $_ := set $all (printf "bridges.%s" $name) $differs -}}
{{- end -}}
{{- $taken := dict -}}
{{- range $path, $differs := $all -}}
{{- range $section, $key := dict "source" (list "slot" "publication") "kafka" (list "topic_prefix") -}}
{{- range $key -}}
{{- $value := dig $section . "" $differs -}}
{{- if and (not $value) (ne $path "config") -}}
{{- fail (printf "%s.%s.%s is missing: a bridge has a slot, a publication and a topic prefix of its own" $path $section .) -}}
{{- end -}}
{{- $value = default "slotbridge" $value -}}
{{- $id := printf "%s %s" . $value -}}
{{- if hasKey $taken $id -}}
{{- fail (printf "%s.%s.%s is %s, as that of %s: a bridge has one of its own" $path $section . $value (get $taken $id)) -}}
{{- end -}}
{{- $_ := set $taken $id $path -}}
{{- end -}}
{{- end -}}
{{- $tables := dig "source" "tables" list $differs -}}
{{- if not $tables -}}
{{- fail (printf "%s.source.tables is empty, which is every table: with `bridges`, list those of each bridge" $path) -}}
{{- end -}}
{{- range $tables -}}
{{- $id := printf "table %s" . -}}
{{- if hasKey $taken $id -}}
{{- fail (printf "%s.source.tables has %s, as %s has: it would be published twice" $path . (get $taken $id)) -}}
{{- end -}}
{{- $_ := set $taken $id $path -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The configuration file of the bridge `name` of `bridges`: (list . NAME) */}}
{{- define "slotbridge.configOfBridge" -}}
{{- $root := index . 0 -}}
{{- $config := include "slotbridge.config" $root | fromYaml -}}
{{- range $section, $differs := index $root.Values.bridges (index . 1) -}}
{{- $_ := set $config $section (mergeOverwrite (default dict (get $config $section)) (deepCopy $differs)) -}}
{{- end -}}
{{- /* They are of the bridge in `config`. */ -}}
{{- $_ := unset $config "failover" -}}
{{- $_ := unset $config "tables" -}}
{{- toYaml $config -}}
{{- end -}}

{{/* slotbridge.yaml: the values' sections with what the chart itself decides. */}}
{{- define "slotbridge.config" -}}
{{- include "slotbridge.validate" . -}}
{{- if .Values.bridges -}}
{{- include "slotbridge.validateBridges" . -}}
{{- end -}}
{{- $config := deepCopy .Values.config -}}
{{- $http := dict "http_host" "0.0.0.0" -}}
{{- $bridge := mergeOverwrite (default dict $config.bridge) $http (dict "http_port" 9187 "spool_folder" "/var/lib/slotbridge/spool" "standby" true) -}}
{{- $_ := set $config "bridge" $bridge -}}
{{- if .Values.failover.enabled -}}
{{- $watch := mergeOverwrite (dig "watch" dict $config.failover) (deepCopy $http) (dict "http_port" 9188) -}}
{{- with include "slotbridge.lease" . -}}
{{- $_ := set $watch "lease" (mergeOverwrite (dig "lease" dict $watch) (dict "name" .)) -}}
{{- end -}}
{{- $drill := mergeOverwrite (dig "drill" dict $config.failover) (dict "folder" "/var/lib/slotbridge/drill") -}}
{{- $own := dict "watch" $watch "drill" $drill "journal" "/var/lib/slotbridge/journal/failover.jsonl" -}}
{{- $_ := set $config "failover" (mergeOverwrite $config.failover $own) -}}
{{- else -}}
{{- $_ := unset $config "failover" -}}
{{- end -}}
{{- if .Values.tables.enabled -}}
{{- $tables := mergeOverwrite (dict "warehouse" "/var/lib/slotbridge/warehouse") $config.tables (deepCopy $http) (dict "http_port" 9189) -}}
{{- $_ := set $config "tables" $tables -}}
{{- else -}}
{{- $_ := unset $config "tables" -}}
{{- end -}}
{{- range $name := list "source" "kafka" "shaping" "tracing" -}}
{{- if not (index $config $name) -}}
{{- $_ := unset $config $name -}}
{{- end -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* The configuration file of a driver whose executors are pods. */}}
{{- define "slotbridge.driverConfig" -}}
{{- $config := include "slotbridge.config" . | fromYaml -}}
{{- $options := include "slotbridge.sparkOptions" . | fromYaml -}}
{{- $_ := set $config.tables "spark_options" (mergeOverwrite $options (default dict $config.tables.spark_options)) -}}
{{- toYaml $config -}}
{{- end -}}

{{/* Spark's options of such a driver. */}}
{{- define "slotbridge.sparkOptions" -}}
{{- $executors := .Values.tables.spark.executors -}}
spark.master: k8s://https://kubernetes.default.svc
spark.kubernetes.namespace: {{ .Release.Namespace }}
# It owns its executors: they end with it, however it ends.
spark.kubernetes.driver.pod.name: ${env:POD_NAME}
spark.kubernetes.container.image: {{ include "slotbridge.image" (list . "tables") }}
spark.kubernetes.container.image.pullPolicy: {{ .Values.image.pullPolicy }}
spark.kubernetes.executor.podTemplateFile: /etc/slotbridge/spark/executor.yaml
spark.executor.instances: {{ $executors.count | quote }}
spark.executor.cores: {{ $executors.cores | quote }}
spark.executor.memory: {{ $executors.memory }}
spark.kubernetes.executor.request.cores: {{ $executors.cpu | quote }}
spark.sql.shuffle.partitions: {{ max 2 (mul $executors.count $executors.cores) | quote }}
spark.driver.host: {{ include "slotbridge.spark" . }}.{{ .Release.Namespace }}.svc
spark.driver.bindAddress: 0.0.0.0
spark.driver.port: "7078"
spark.blockManager.port: "7079"
# How soon it misses one that was deleted by force: 30 s is Spark's default.
spark.kubernetes.executor.apiPollingInterval: 10s
spark.kubernetes.executor.missingPodDetectDelta: 10s
# Pods that failed long ago do not count: too many would end the driver.
spark.executor.failuresValidityInterval: 1h
# Who reaches the driver's port could run code in it: executors get a secret with their pods.
spark.authenticate: "true"
spark.network.crypto.enabled: "true"
# What else the driver would make and remove, and need rights for.
spark.kubernetes.executor.disableConfigMap: "true"
spark.kubernetes.driver.service.deleteOnTermination: "false"
spark.kubernetes.driver.ownPersistentVolumeClaim: "false"
spark.kubernetes.driver.reusePersistentVolumeClaim: "false"
{{- end -}}

{{/* Environment, volumes and their mounts that every pod has: of the environment, (list . COMPONENT-VALUES) */}}
{{- define "slotbridge.envFrom" -}}
{{- with default (index . 0).Values.existingSecret (index . 1).existingSecret }}
envFrom:
  - secretRef:
      name: {{ . }}
{{- end }}
{{- end -}}

{{- define "slotbridge.mounts" -}}
- {name: config, mountPath: /etc/slotbridge/slotbridge.yaml, subPath: slotbridge.yaml, readOnly: true}
{{ include "slotbridge.kafkaMounts" . }}
{{- if .Values.tls.postgres.existingSecret }}
- {name: tls-postgres, mountPath: /etc/slotbridge/tls/postgres, readOnly: true}
{{- end }}
{{- end -}}

{{/* What a client of Kafka alone needs. */}}
{{- define "slotbridge.kafkaMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.tls.kafka.existingSecret }}
- {name: tls-kafka, mountPath: /etc/slotbridge/tls/kafka, readOnly: true}
{{- end }}
{{- end -}}

{{- define "slotbridge.volumes" -}}
- name: config
  secret: {secretName: {{ include "slotbridge.fullname" . }}, defaultMode: 0440}
{{ include "slotbridge.commonVolumes" . }}
{{- end -}}

{{- define "slotbridge.commonVolumes" -}}
{{- include "slotbridge.kafkaVolumes" . -}}
{{- with .Values.tls.postgres.existingSecret }}
- name: tls-postgres
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{- define "slotbridge.kafkaVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
{{- with .Values.tls.kafka.existingSecret }}
- name: tls-kafka
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* A volume that ends with its pod: (list NAME SIZE CLASS LABELS) */}}
{{- define "slotbridge.scratch" -}}
- name: {{ index . 0 }}
{{- if index . 2 }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        storageClassName: {{ index . 2 | quote }}
        resources:
          requests:
            storage: {{ index . 1 }}
{{- else }}
  emptyDir:
    sizeLimit: {{ index . 1 }}
{{- end }}
{{- end -}}

{{/* What every pod's spec begins with: (list . COMPONENT-VALUES), or (list . COMPONENT-VALUES "failover") of a pod that
     talks to Kubernetes' API by an account of its own. */}}
{{- define "slotbridge.pod" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- if gt (len .) 2 -}}
serviceAccountName: {{ include "slotbridge.ownServiceAccount" (list $root (index . 2)) }}
automountServiceAccountToken: true
{{- else -}}
serviceAccountName: {{ include "slotbridge.serviceAccount" $root }}
automountServiceAccountToken: false
{{- end }}
enableServiceLinks: false
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $component $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with index $component "priorityClassName" }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* What every container ends with: (list . COMPONENT-VALUES) */}}
{{- define "slotbridge.container" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
# The last lines of the log, with `error: …` and its hint, are in `kubectl describe pod`.
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  {{- toYaml $root.Values.securityContext | nindent 2 }}
{{- with index $component "resources" }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with index $component "extraEnv" }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Pods of a component on different nodes, where the scheduler can: (list . "bridge" CONSTRAINTS) */}}
{{- define "slotbridge.spread" -}}
{{- $root := index . 0 -}}
topologySpreadConstraints:
{{- if index . 2 }}
  {{- toYaml (index . 2) | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "slotbridge.selector" $root | nindent 8 }}
        app.kubernetes.io/component: {{ index . 1 }}
{{- end }}
{{- end -}}

{{/* A PodDisruptionBudget where there are several pods: (list . "bridge" COMPONENT-VALUES) */}}
{{- define "slotbridge.disruption" -}}
{{- $root := index . 0 -}}
{{- $component := index . 2 -}}
{{- if and $component.podDisruptionBudget.enabled (gt (int $component.replicas) 1) }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "slotbridge.fullname" $root }}-{{ index . 1 }}
  labels:
    {{- include "slotbridge.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ index . 1 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "slotbridge.selector" $root | nindent 6 }}
      app.kubernetes.io/component: {{ index . 1 }}
{{- end }}
{{- end -}}

{{/* Of a pod that another one stands by for: what is frozen holds its slot or its lock until the kubelet ends it, so that is
     soon: after three probes and 10 s of grace, which a process that still runs does not need. (path) */}}
{{- define "slotbridge.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 1
  timeoutSeconds: 5
  failureThreshold: 120
livenessProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
  terminationGracePeriodSeconds: 10
readinessProbe:
  httpGet: {path: {{ . }}, port: http}
  periodSeconds: 2
  timeoutSeconds: 5
{{- end -}}
