#!/usr/bin/env bash
# A SLURM cluster of two nodes, n1 and n2, both on this machine. Run as root, with Debian's slurm-wlm and munge installed.
#
#   two_nodes.sh start DIR   prints the path of slurm.conf once both nodes are idle; everything else is kept under DIR
#   two_nodes.sh stop DIR
set -euo pipefail
action=$1 dir=$2

pids() { cat "$dir"/*.pid 2>/dev/null || true; }

if [[ $action == stop ]]; then
  for pid in $(pids); do kill "$pid" 2>/dev/null || true; done
  exit 0
fi

mkdir -p "$dir/state" /run/munge
if [[ ! -e /etc/munge/munge.key ]]; then
  head -c 1024 /dev/urandom >/etc/munge/munge.key
fi
chown munge: /etc/munge/munge.key /run/munge
chmod 400 /etc/munge/munge.key
pgrep -x munged >/dev/null || runuser -u munge -- munged

free_ports() {
  python3 - "$1" <<'PYTHON'
import socket, sys
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in sockets))
PYTHON
}
read -r controller first second < <(free_ports 3)
host=$(hostname -s) cores=$(nproc)
cat >"$dir/slurm.conf" <<CONF
ClusterName=two-nodes
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller
SlurmctldPidFile=$dir/controller.pid
SlurmctldLogFile=$dir/controller.log
StateSaveLocation=$dir/state
SlurmUser=root
SlurmdUser=root
SlurmdPidFile=$dir/%n.pid
SlurmdLogFile=$dir/%n.log
SlurmdSpoolDir=$dir/%n
AuthType=auth/munge
# A requeued job starts again once its credentials have run out.
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
JobCompType=jobcomp/none
ReturnToService=2
KillWait=5
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$first CPUs=$cores RealMemory=4000
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$second CPUs=$cores RealMemory=4000
PartitionName=all Nodes=n1,n2 Default=YES OverSubscribe=FORCE:4
CONF
export SLURM_CONF=$dir/slurm.conf
slurmctld
sleep 1
slurmd -N n1
slurmd -N n2
for _ in $(seq 60); do
  if [[ $(sinfo --noheader --format=%T%D 2>/dev/null) == idle2 ]]; then
    echo "$SLURM_CONF"
    exit 0
  fi
  sleep 0.5
done
sinfo >&2
exit 1
