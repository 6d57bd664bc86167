#!/usr/bin/env bash
# node.sh COMMAND...: runs COMMAND on a temporary Kubernetes node that runs real containers. The script starts the node
# in its own Linux namespaces, imports the images that images.sh has built, runs COMMAND in these namespaces with
# KUBECONFIG and NODE set, and removes the node. The programs, the images and, if the run fails, the logs remain in
# .deps/. node.sh needs root for namespaces, mounts and cgroups. README.md in this directory describes the node.
set -euo pipefail
cd "$(dirname "$0")/../.."

start_limit_seconds=300
# The imported images take most of this space. Below 200 MiB of free space, the kubelet evicts pods.
min_free_mib=4096
cgroups=/sys/fs/cgroup

say() { echo "node: $*" >&2; }

requirements() {
  local tool missing=0
  [[ $EUID == 0 ]] || {
    say "must run as root, because it creates namespaces, mounts and cgroups"
    missing=1
  }
  declare -A packages=([runc]=runc [nft]=nftables [ip]=iproute2
    [unshare]=util-linux [nsenter]=util-linux [openssl]=openssl [mount]=mount)
  for tool in "${!packages[@]}"; do
    command -v "$tool" >/dev/null || {
      say "missing: $tool (Debian, Ubuntu: ${packages[$tool]})"
      missing=1
    }
  done
  cni=
  for tool in /usr/lib/cni /opt/cni/bin; do [[ ! -x $tool/ptp ]] || cni=$tool; done
  [[ -n "$cni" ]] || {
    say "missing: the CNI plugin ptp (Debian, Ubuntu: containernetworking-plugins)"
    missing=1
  }
  [[ -d $cgroups/memory || -f $cgroups/cgroup.controllers ]] || {
    say "missing: cgroups at $cgroups"
    missing=1
  }
  local free_mib
  free_mib=$(df --output=avail --block-size=1M . | tail -n 1)
  ((free_mib >= min_free_mib)) || {
    say "needs $min_free_mib MiB of free disk space; $free_mib MiB are free"
    missing=1
  }
  return $missing
}

# Creates the cgroups of the node: with cgroup v2, a single one; with cgroup v1, one in each hierarchy listed below.
make_cgroups() {
  local hierarchy
  if [[ -f $cgroups/cgroup.controllers ]]; then
    mkdir "$cgroups/$name"
    return
  fi
  for hierarchy in cpu cpuacct cpuset memory devices freezer blkio pids systemd; do
    [[ ! -d $cgroups/$hierarchy ]] || mkdir "$cgroups/$hierarchy/$name"
  done
  if [[ -d $cgroups/cpuset ]]; then
    cat $cgroups/cpuset/cpuset.cpus >"$cgroups/cpuset/$name/cpuset.cpus"
    cat $cgroups/cpuset/cpuset.mems >"$cgroups/cpuset/$name/cpuset.mems"
  fi
}

# Retries, because the processes in the cgroups have been killed but may not have exited yet.
remove_cgroups() {
  local directory attempt
  for ((attempt = 0; attempt < 50; attempt++)); do
    for directory in "$cgroups/$name" "$cgroups"/*/"$name"; do
      [[ ! -d $directory ]] || find "$directory" -depth -type d -exec rmdir {} + 2>/dev/null || true
    done
    compgen -G "$cgroups/*/$name" >/dev/null || [[ -d $cgroups/$name ]] || return 0
    sleep 0.1
  done
  say "failed to remove the cgroups named $name"
}

take_down() {
  local status=$?
  trap - EXIT
  if [[ -n "${unshared:-}" ]]; then
    # Killing PID 1 of the namespace kills all its processes.
    [[ -z "${init:-}" ]] || kill -KILL "$init" 2>/dev/null || true
    kill -KILL "$unshared" 2>/dev/null || true
    wait "$unshared" 2>/dev/null || true
  fi
  remove_cgroups
  if ((status != 0)) && [[ -d $node/log ]]; then
    rm -rf .deps/node/failed
    mv "$node/log" .deps/node/failed
    say "the logs of the node are in .deps/node/failed"
  fi
  rm -rf "$node"
  exit "$status"
}

await() { # what, command...
  local what=$1 end=$((SECONDS + start_limit_seconds))
  shift
  until "$@" >/dev/null 2>&1; do
    kill -0 "$unshared" 2>/dev/null || {
      say "the node exited unexpectedly"
      return 1
    }
    ((SECONDS < end)) || {
      say "timed out after $start_limit_seconds s waiting for $what"
      return 1
    }
    sleep 0.1
  done
}

requirements
scripts/tools node
mkdir -p .deps/node
node=$(mktemp -d "$PWD/.deps/node/run.XXXXXX")
name=ovfleet-$(basename "$node" | tr '.' '-')
trap take_down EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

started=$EPOCHREALTIME
make_cgroups
export NODE="$node" NODE_CGROUP="$name" NODE_CNI="$cni" PATH="$PWD/.deps/tools/bin:$PATH"
unshare --net --mount --pid --fork --kill-child --mount-proc \
  bash tests/cluster/node/init.sh </dev/null >"$node/init.log" 2>&1 &
unshared=$!
await "the namespaces" test -e "/proc/$unshared/task/$unshared/children" -a -s "$node/init.log"
init=$(tr -d ' ' <"/proc/$unshared/task/$unshared/children")

inside() {
  nsenter -t "$init" --net --mount --pid --wdns="$PWD" -- env KUBECONFIG="$node/admin.kubeconfig" \
    KUBECACHEDIR="$node/user/kubectl" HELM_CACHE_HOME="$node/user/helm" HELM_CONFIG_HOME="$node/user/helm" \
    HELM_DATA_HOME="$node/user/helm" "$@"
}

await "the node to be ready" test -e "$node/ready" || {
  tail -n 5 "$node/init.log" "$node"/log/* >&2 || true
  exit 1
}
say "ready after $(awk "BEGIN {printf \"%.1f\", $EPOCHREALTIME - $started}") s"
imported=$EPOCHREALTIME
for archive in .deps/node/images/*.tar; do
  [[ -e $archive ]] || continue
  inside ctr --namespace k8s.io images import "$archive" >>"$node/log/import.log" 2>&1 || {
    say "failed to import $archive"
    tail -n 5 "$node/log/import.log" >&2
    exit 1
  }
done
say "images imported in $(awk "BEGIN {printf \"%.1f\", $EPOCHREALTIME - $imported}") s"
inside "$@"
