#!/bin/bash
# The other half of `cargo xtask interop --peer`: run it on the host with the RDMA device.
#
#   bash ferroce-peer.sh ADDRESS [PORT]
#
# ADDRESS is this host's address on the RoCE network. It needs gcc, libibverbs-dev and librdmacm-dev (Debian's names), the
# programs rping and ucmatose (rdmacm-utils) and ibv_rc_pingpong (ibverbs-utils), and no privilege beyond access to
# /dev/infiniband. It waits on TCP port PORT (7001) and runs those five programs, nothing else, for whoever connects: run
# it on a network that you trust, and stop it with ctrl-C when the test is over. Nothing is left behind.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,/^set/p' "$0" | sed 's/^# \?//; $d'; exit 2; }
ADDRESS=$1 PORT=${2:-7001}
for program in gcc rping ucmatose ibv_rc_pingpong; do
    command -v $program >/dev/null || { echo "missing: $program" >&2; exit 1; }
done
DIR=$(mktemp -d)
trap 'rm -rf "$DIR"; trap - EXIT; kill 0' EXIT INT TERM
cd "$DIR"
#@SOURCES@
gcc -O2 -o verbs-agent verbs-agent.c -libverbs
gcc -O2 -o cm-agent cm-agent.c -lrdmacm -libverbs
gcc -O2 -o host-agent host-agent.c
echo "On the host with ferroce's source run:  cargo xtask interop --peer $ADDRESS --peer-port $PORT"
./host-agent -p "$PORT" "$DIR" &
wait $!
