#!/bin/sh
# Installs the Debian package in a fresh Debian, boots it with systemd in a container, and uses the units (units.sh).
# booted.sh BASE FILE: the root's files, with systemd, and the package. Needs systemd-nspawn.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
base=$1 file=$2
top=$(mktemp -d)
export here base file top
trap 'rmdir "$top"' EXIT
unshare --mount --net sh -euc '
    mount -t tmpfs none "$top"
    mkdir "$top/upper" "$top/work" "$top/root"
    mount -t overlay -o "lowerdir=$base,upperdir=$top/upper,workdir=$top/work" none "$top/root"
    cp "$here/units.sh" "$file" "$top/root/root/"
    chroot "$top/root" dpkg --install "/root/$(basename "$file")" >"$top/install" 2>&1 || { cat "$top/install"; exit 1; }
    cat >"$top/root/etc/systemd/system/check.service" <<UNIT
[Unit]
After=basic.target
[Service]
Type=oneshot
TimeoutStartSec=300
StandardOutput=file:/root/said
StandardError=file:/root/said
ExecStart=/bin/sh /root/units.sh
UNIT
    ln -s ../check.service "$top/root/etc/systemd/system/multi-user.target.wants/"
    ip link set lo up
    # The broker keeps its users apart by a BPF program.
    systemd-nspawn --quiet --directory="$top/root" --register=no --keep-unit --capability=CAP_BPF --system-call-filter=bpf \
        --boot >"$top/boot" 2>&1 </dev/null || true
    cat "$top/root/root/said" || tail -n 40 "$top/boot"
'
