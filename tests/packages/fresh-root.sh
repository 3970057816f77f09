#!/bin/sh
# Runs check.sh in a fresh Debian with namespaces of its own, which end with it.
# fresh-root.sh BASE KIND FILE: the root's files, and the package.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
base=$1 kind=$2 file=$3
top=$(mktemp -d)
export here base kind file top
trap 'rmdir "$top"' EXIT
unshare --mount --net --pid --fork --kill-child sh -euc '
    mount -t tmpfs none "$top"
    mkdir "$top/upper" "$top/work" "$top/root"
    mount -t overlay -o "lowerdir=$base,upperdir=$top/upper,workdir=$top/work" none "$top/root"
    mount -t proc none "$top/root/proc"
    mkdir -p "$top/root/dev/pts"
    mount -t devpts -o ptmxmode=666 none "$top/root/dev/pts"
    mkdir -p "$top/root/run/package"
    cp "$here/check.sh" "$file" "$top/root/run/package/"
    ip link set lo up
    exec env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 HOME=/root \
        chroot "$top/root" sh /run/package/check.sh "$kind" "/run/package/$(basename "$file")"
'
