#!/bin/bash
# Prepares a folder for virtual machines with stock Debian kernels: programs that run in them, and by kernel.sh a folder
# linux-SERIES for each kernel.
#
#   [LUSTRE=CHECKOUT] setup.sh FOLDER SERIES[,SERIES] [in-use]
#
# Needs root and Debian's package archive. A second call with the same folder does nothing but compile agents that
# have changed; so does one with `in-use`, which fails if what is there has to be made anew. A kernel that can't be had
# is no failure: linux-SERIES.log says why it is missing, and the next call tries again. With a checkout of Lustre, lustre.sh makes a
# folder lustre-SERIES for kernels of this distribution; lustre-SERIES.log says why one is missing. SIGTERM ends it after the
# present step.
set -euo pipefail
trap 'exit 143' TERM
HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/packages.sh"
LAB=$1 KERNELS=${2//,/ } IN_USE=${3:-}
mkdir -p "$LAB"; LAB=$(cd "$LAB" && pwd); cd "$LAB"
anew() { echo "$LAB has to be prepared anew ($1 has changed), but another run uses it" >&2; exit 1; }

# The programs that run in guests. Other runs may use those that are there.
agents() {
    local stamp new; stamp=$(cat "$HERE"/*.[ch] "$HERE/guest.sh" | sha256sum | cut -c1-16)
    [ "$(cat agents-ready 2>/dev/null)" = "$stamp" ] && return
    new=$(mktemp -d new.XXXXXX); trap "rm -rf '$LAB/$new'" EXIT
    gcc -Wall -O2 -o "$new/verbs-agent" "$HERE/verbs-agent.c" -libverbs
    gcc -Wall -O2 -o "$new/cm-agent" "$HERE/cm-agent.c" -lrdmacm -libverbs
    gcc -Wall -O2 -o "$new/host-agent" "$HERE/host-agent.c"
    for program in peer conformance rdma; do gcc -Wall -O2 -o "$new/rds-$program" "$HERE/rds-$program.c"; done
    cp "$HERE/guest.sh" "$new/"
    mv "$new"/* .
    echo "$stamp" > agents-ready
}

packages() {
    update
    # A qemu-utils of backports excludes the distribution's qemu: then it has to be the distribution's, too.
    local utils=qemu-utils tools=
    apt-get install -s -q qemu-system-x86 qemu-utils >/dev/null 2>&1 </dev/null || utils=qemu-utils/$(. /etc/os-release; echo "$VERSION_CODENAME")
    # A compiler that is there is left alone: somebody may be using it.
    command -v make >/dev/null || tools+=" make"
    command -v gcc >/dev/null && [ -e /usr/include/stdio.h ] || tools+=" gcc libc6-dev"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q $PATIENT --no-install-recommends --allow-downgrades \
        qemu-system-x86 "$utils" busybox-static kmod cpio xz-utils iproute2 tcpdump e2fsprogs fio \
        rdma-core ibverbs-utils ibverbs-providers rdmacm-utils libibverbs-dev librdmacm-dev perftest \
        libelf-dev libssl3 $tools \
        openssh-client dropbear-bin >/dev/null </dev/null
}

# A script as a process of its own, which SIGTERM reaches: `part LOG SCRIPT ARGUMENT…`. It holds the lock that is our standard input.
part() {
    local status=0 log=$1 script=$2; shift 2
    bash "$HERE/$script" "$LAB" "$@" <&0 2>"$log" &
    WORKER=$!
    trap 'kill $WORKER 2>/dev/null; wait $WORKER; exit 143' TERM
    wait $WORKER || status=$?
    trap 'exit 143' TERM
    return $status
}

STAMP=$(sha256sum < "$HERE/setup.sh" | cut -c1-16)
if [ "$(cat ready 2>/dev/null)" != "$STAMP" ]; then
    [ -z "$IN_USE" ] || anew setup.sh
    rm -rf ready agents-ready new.*
    packages
    echo "$STAMP" > ready
fi
agents

STAMP=$(cat "$HERE/kernel.sh" "$HERE/packages.sh" | sha256sum | cut -c1-16)
for k in $KERNELS; do
    is=$(cat "linux-$k/ready" 2>/dev/null) || is=
    [ "$is" = "$STAMP" ] && continue
    [ -z "$IN_USE" ] || [ -z "$is" ] || anew kernel.sh
    # One that is missing is not made under the eyes of others.
    [ -z "$IN_USE" ] || continue
    rm -rf "linux-$k"
    update || echo "the package archive can't be reached" >&2
    if part "linux-$k.log" kernel.sh "$k"; then
        echo "$STAMP" > "linux-$k/ready"; rm "linux-$k.log"
    else
        rm -rf "linux-$k"
        echo "Linux $k is missing: $(tail -1 "linux-$k.log")" >&2
    fi
done

[ -n "${LUSTRE:-}" ] || exit 0
for k in $KERNELS; do
    # Later kernels' modules are built with the compiler of a later distribution, which has no autotools here.
    case $k in 7.*) continue;; esac
    part "lustre-$k.log" lustre.sh "$k" "$LUSTRE" $IN_USE && rm "lustre-$k.log" ||
        echo "LNet for Linux $k is missing: $(tail -1 "lustre-$k.log")" >&2
done
