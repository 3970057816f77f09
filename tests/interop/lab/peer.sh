#!/bin/bash
# The other half of `cargo xtask interop --peer`; without arguments it says how it is used.
set -euo pipefail
usage() {
    cat >&2 <<'END'
usage: bash ferroce-peer.sh [--until-eof] [--device NAME] ADDRESS [PORT]

Runs on the host with the RDMA device. ADDRESS is this host's address on the RoCE network; --device NAME wants it to be
that device's.
In a kit (cargo xtask kit) the agents are beside the script; else it compiles them, for which it needs gcc and the headers
of libibverbs and librdmacm:
  Debian, Ubuntu:  apt install gcc libc6-dev libibverbs-dev librdmacm-dev
  Fedora, RHEL:    dnf install gcc rdma-core-devel
What is about ibv_rc_pingpong, rping and ucmatose is not run where these are missing (Debian: ibverbs-utils, rdmacm-utils;
RHEL: libibverbs-utils, librdmacm-utils). No privilege is needed beyond access to /dev/infiniband and locked memory
(ulimit -l).

It waits on TCP port PORT (7001) and runs verbs-agent, cm-agent, host-facts, rdma-end (which serves and maps images of its
own), rping, ucmatose and ibv_rc_pingpong, nothing else, for whoever connects: use a network that you trust. The other host must reach TCP ports
PORT, 18600 and 18515 and UDP port 4791. Ctrl-C ends it (with --until-eof also the end of its input); then everything it
started and wrote is gone.
END
    exit 2
}
UNTIL_EOF= WANTED=
while :; do
    case "${1:-}" in
    --until-eof) UNTIL_EOF=1; shift ;;
    --device) [ $# -ge 2 ] || usage; WANTED=$2; shift 2 ;;
    *) break ;;
    esac
done
[ $# -ge 1 ] && [ "${1#-}" = "$1" ] || usage
ADDRESS=$1 PORT=${2:-7001}
# Of the kit that this script is in.
KIT=$(dirname "$(readlink -f "${BASH_SOURCE[0]:-/}")")
[ -x "$KIT/verbs-agent" ] && [ -x "$KIT/host-agent" ] || KIT=
for program in stdbuf $([ -n "$KIT" ] || echo gcc); do
    command -v $program >/dev/null || { echo "missing: $program" >&2; usage; }
done
DIR=$(mktemp -d "${TMPDIR:-/tmp}/ferroce-peer.XXXXXX")
finish() { trap - EXIT; kill $(jobs -p) 2>/dev/null || true; rm -rf "$DIR"; }
trap finish EXIT
trap 'exit 130' INT TERM HUP
cd "$DIR"
#@SOURCES@
chmod +x host-facts rdma-end
if [ -n "$KIT" ]; then
    cp "$KIT"/verbs-agent "$KIT"/cm-agent "$KIT"/host-agent .
    export FERROCE_BIN=$KIT
else
    rm rdma-end
    gcc -O2 -o verbs-agent verbs-agent.c -libverbs && gcc -O2 -o cm-agent cm-agent.c -lrdmacm -libverbs &&
        gcc -O2 -o host-agent host-agent.c || { echo "can't compile the agents" >&2; usage; }
fi
ulimit -l unlimited 2>/dev/null || ulimit -l "$(ulimit -Hl)"
case $(ulimit -l) in unlimited) ;; *) [ "$(ulimit -l)" -ge 65536 ] ||
    echo "warning: only $(ulimit -l) KiB of memory may be locked; registering memory may fail" >&2 ;; esac
FOUND=$(./verbs-agent -l -g "$ADDRESS" ${WANTED:+-d "$WANTED"}) || exit 1
read -r _ DEVICE GID MTU RDMA_PORT <<< "$FOUND"
echo "device $DEVICE port $RDMA_PORT, GID index $GID, path MTU up to $MTU"
./host-agent -p "$PORT" "$DIR" &
AGENT=$!
sleep 0.5; kill -0 $AGENT 2>/dev/null || exit 1
echo "On the other host run, in the kit or in ferroce's source:"
echo "    $([ -n "$KIT" ] && echo ./ferroce-interop || echo cargo xtask interop) --peer $ADDRESS$([ "$PORT" = 7001 ] || echo " --peer-port $PORT")"
if [ -n "$UNTIL_EOF" ]; then
    exec 3<&0
    cat <&3 >/dev/null &
    wait -n || true
else
    wait $AGENT
fi
