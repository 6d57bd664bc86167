#!/usr/bin/env bash
# PID 1 of the node's PID namespace. All other programs of the node end with this process. NODE is the directory of the
# node, NODE_CGROUP is the name of its cgroup, and NODE_CNI is the directory of the CNI plugins. This script creates
# $NODE/ready when the node can run pods.
set -euo pipefail

address=10.99.0.1
services=10.96.0.0/16
pods=10.244.0.0/24
dns=10.96.0.10
api=https://$address:6443
pki=$NODE/pki
echo "init: in the namespaces"

mounts() {
  mkdir -p "$NODE"/{lib,log,pki,user,sysctl,pids}
  mount --make-rprivate /
  mount -t tmpfs -o mode=755 tmpfs /run
  mount --bind "$NODE/lib" /var/lib
  mount --bind "$NODE/log" /var/log
  # The kubelet would change these kernel settings for the whole machine, so mount private files over them.
  local sysctl
  for sysctl in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    local file=$NODE/sysctl/${sysctl//\//-}
    echo "${sysctl#*=}" >"$file"
    mount --bind "$file" "/proc/sys/${sysctl%=*}"
  done
}

network() {
  ip link set lo up
  # A bridge without ports can have the address of the node, so no physical device is needed.
  ip link add node0 type bridge
  ip address add $address/24 dev node0
  ip link set node0 up
  ip route add $services dev node0
  echo 1 >/proc/sys/net/ipv4/ip_forward
}

issue() { # file, subject, names
  openssl ecparam -name prime256v1 -genkey -noout -out "$pki/$1.key"
  openssl req -new -key "$pki/$1.key" -subj "$2" -out "$pki/$1.csr"
  openssl x509 -req -in "$pki/$1.csr" -CA "$pki/ca.crt" -CAkey "$pki/ca.key" -CAcreateserial -days 2 \
    -extfile <(printf 'extendedKeyUsage=serverAuth,clientAuth\n%s\n' "${3:+subjectAltName=$3}") -out "$pki/$1.crt"
}

kubeconfig() { # file
  cat >"$NODE/$1.kubeconfig" <<YAML
apiVersion: v1
kind: Config
current-context: node
contexts: [{name: node, context: {cluster: node, user: $1}}]
clusters: [{name: node, cluster: {server: "$api", certificate-authority: "$pki/ca.crt"}}]
users: [{name: $1, user: {client-certificate: "$pki/$1.crt", client-key: "$pki/$1.key"}}]
YAML
}

certificates() {
  openssl ecparam -name prime256v1 -genkey -noout -out "$pki/ca.key"
  openssl req -x509 -new -key "$pki/ca.key" -subj "/CN=node" -days 2 -out "$pki/ca.crt"
  local dns_names=DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc
  issue api-server /CN=api-server "IP:$address,IP:127.0.0.1,IP:10.96.0.1,$dns_names,DNS:kubernetes.default.svc.cluster.local"
  issue kubelet-server /CN=node1 "IP:$address,DNS:node1"
  issue kubelet "/O=system:nodes/CN=system:node:node1" ""
  issue admin "/O=system:masters/CN=admin" ""
  issue controller-manager "/CN=system:kube-controller-manager" ""
  issue scheduler "/CN=system:kube-scheduler" ""
  issue proxy "/CN=system:kube-proxy" ""
  issue coredns "/CN=system:coredns" ""
  openssl genrsa -out "$pki/sa.key" 2048
  openssl rsa -in "$pki/sa.key" -pubout -out "$pki/sa.pub"
  local user
  for user in admin kubelet controller-manager scheduler proxy coredns; do kubeconfig "$user"; done
}

settings() {
  mkdir -p /run/cni
  cat >"$NODE/containerd.toml" <<TOML
version = 3
root = "$NODE/lib/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "localhost/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
disable_apparmor = true
netns_mounts_under_state_dir = true
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
SystemdCgroup = false
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["$NODE_CNI"]
conf_dir = "$NODE/cni"
TOML
  mkdir -p "$NODE/cni"
  cat >"$NODE/cni/pods.conflist" <<JSON
{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp", "ipMasq": false, "mtu": 1500, "ipam": {
  "type": "host-local", "dataDir": "/run/cni/networks", "ranges": [[{"subnet": "$pods"}]],
  "routes": [{"dst": "0.0.0.0/0"}]}}]}
JSON
  cat >"$NODE/kubelet.yaml" <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /$NODE_CGROUP
enforceNodeAllocatable: [pods]
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
address: $address
clusterDNS: [$dns]
clusterDomain: cluster.local
resolvConf: ""
oomScoreAdj: 0
failSwapOn: false
makeIPTablesUtilChains: false
serializeImagePulls: false
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
evictionHard: {memory.available: 50Mi, nodefs.available: 200Mi, imagefs.available: 200Mi}
nodeStatusUpdateFrequency: 4s
syncFrequency: 2s
crashLoopBackOff: {maxContainerRestartPeriod: 1s}
featureGates: {KubeletCrashLoopBackOffMax: true}
cpuManagerPolicy: static
cpuManagerReconcilePeriod: 1s
kubeReserved: {cpu: 50m}
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: "$pki/ca.crt"}}
authorization: {mode: Webhook}
tlsCertFile: $pki/kubelet-server.crt
tlsPrivateKeyFile: $pki/kubelet-server.key
YAML
  cat >"$NODE/proxy.yaml" <<YAML
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
bindAddress: $address
clusterCIDR: 10.244.0.0/16
hostnameOverride: node1
oomScoreAdj: 0
clientConnection: {kubeconfig: "$NODE/proxy.kubeconfig"}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s, udpTimeout: 0s,
  udpStreamTimeout: 0s}
YAML
  # Log the operator's writes with the address of its pod.
  cat >"$NODE/audit.yaml" <<YAML
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, userGroups: ["system:serviceaccounts:ovfleet"], verbs: [create, update, patch, delete]}
- {level: None}
YAML
  # The programs of the node resolve the names of Services in the same way as its pods do.
  echo "nameserver $dns" >"$NODE/resolv.conf"
  # /etc/resolv.conf may be a link into /run, which is empty here.
  local resolv
  resolv=$(readlink -m /etc/resolv.conf)
  if [[ $resolv == /run/* ]]; then mkdir -p "${resolv%/*}" && touch "$resolv"; fi
  mount --bind "$NODE/resolv.conf" "$resolv"
  cat >"$NODE/Corefile" <<COREFILE
.:53 {
  bind $address
  errors
  ready 127.0.0.1:8181
  kubernetes cluster.local {
    kubeconfig $NODE/coredns.kubeconfig node
  }
}
COREFILE
}

# Runs a command and restarts it whenever it ends. Its process ID is in $NODE/pids/NAME.
supervise() { # name, command...
  local name=$1
  shift
  while :; do
    "$@" >>"/var/log/$name.log" 2>&1 &
    echo $! >"$NODE/pids/$name"
    wait $! || true
    sleep 0.2
  done
}

until_true() { until "$@" >/dev/null 2>&1; do sleep 0.05; done; }

kube() { kubectl --kubeconfig "$NODE/admin.kubeconfig" "$@"; }

store_and_api() {
  supervise etcd etcd --data-dir "$NODE/lib/etcd" --unsafe-no-fsync --log-level=warn \
    --listen-client-urls=http://127.0.0.1:2379 --advertise-client-urls=http://127.0.0.1:2379 \
    --listen-peer-urls=http://127.0.0.1:0 &
  supervise kube-apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address=$address \
    --advertise-address=$address --secure-port=6443 --authorization-mode=Node,RBAC --allow-privileged=true \
    --service-cluster-ip-range=$services --client-ca-file="$pki/ca.crt" --cert-dir="$pki" \
    --tls-cert-file="$pki/api-server.crt" --tls-private-key-file="$pki/api-server.key" \
    --kubelet-client-certificate="$pki/admin.crt" --kubelet-client-key="$pki/admin.key" \
    --kubelet-certificate-authority="$pki/ca.crt" --kubelet-preferred-address-types=InternalIP \
    --service-account-key-file="$pki/sa.pub" --service-account-signing-key-file="$pki/sa.key" \
    --service-account-issuer=https://kubernetes.default.svc.cluster.local \
    --audit-policy-file="$NODE/audit.yaml" --audit-log-path=/var/log/audit.log \
    --requestheader-client-ca-file="$pki/ca.crt" --requestheader-allowed-names=nobody \
    --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group \
    --requestheader-extra-headers-prefix=X-Remote-Extra- &
}

controllers() {
  local config=$NODE/controller-manager.kubeconfig
  supervise kube-controller-manager kube-controller-manager --kubeconfig="$config" \
    --authentication-kubeconfig="$config" --authorization-kubeconfig="$config" --leader-elect=false \
    --secure-port=0 --use-service-account-credentials=true --root-ca-file="$pki/ca.crt" \
    --service-account-private-key-file="$pki/sa.key" --kube-api-qps=500 --kube-api-burst=1000 \
    --horizontal-pod-autoscaler-sync-period=1s &
  config=$NODE/scheduler.kubeconfig
  supervise kube-scheduler kube-scheduler --kubeconfig="$config" --authentication-kubeconfig="$config" \
    --authorization-kubeconfig="$config" --leader-elect=false --secure-port=0 &
}

cluster_dns() {
  kube apply -f - <<YAML
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: system:coredns}
rules:
- {apiGroups: [""], resources: [services, pods, namespaces], verbs: [list, watch]}
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: system:coredns}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: system:coredns}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: system:coredns}]
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system}
spec:
  clusterIP: $dns
  ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kube-dns, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns}}
addressType: IPv4
ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
endpoints: [{addresses: ["$address"]}]
YAML
}

bring_up() {
  mounts
  network
  certificates
  settings
  store_and_api
  supervise containerd containerd --config "$NODE/containerd.toml" &
  until_true kube get --raw /readyz
  until_true ctr --namespace k8s.io images import "$NODE/../base/pause.tar"
  controllers
  supervise kubelet kubelet --config "$NODE/kubelet.yaml" --kubeconfig "$NODE/kubelet.kubeconfig" \
    --hostname-override=node1 --node-ip=$address --root-dir="$NODE/lib/kubelet" &
  supervise kube-proxy kube-proxy --config "$NODE/proxy.yaml" &
  supervise coredns coredns -conf "$NODE/Corefile" &
  until_true cluster_dns
  until_true kube wait --for=condition=Ready node/node1 --timeout=1s
  until_true kube get serviceaccount default
  until_true getent ahostsv4 kubernetes.default.svc.cluster.local
  touch "$NODE/ready"
}

bring_up
# PID 1 inherits orphaned processes, which bash reaps while it waits.
while :; do wait -n || true; done
