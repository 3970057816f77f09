#!/bin/bash
# Prepares a virtual machine with a stock Debian kernel: rdma_rxe from the kernel package, and the RTRS and RNBD
# modules (which Debian's configuration leaves out) built from Debian's own kernel source package.
#
#   setup.sh FOLDER [in-use]
#
# Needs root and Debian's package archive. A second call with the same folder does nothing but compile agents that
# have changed; so does one with `in-use`, which fails if there is more to do. SIGTERM ends it after the present step.
set -euo pipefail
trap 'exit 143' TERM
HERE=$(cd "$(dirname "$0")" && pwd)
LAB=$1 IN_USE=${2:-}
mkdir -p "$LAB"; LAB=$(cd "$LAB" && pwd); cd "$LAB"

# The programs that run in guests. Other runs may use those that are there.
agents() {
    local stamp new; stamp=$(cat "$HERE"/*.[ch] "$HERE/guest.sh" | sha256sum | cut -c1-16)
    [ "$(cat agents-ready 2>/dev/null)" = "$stamp" ] && return
    new=$(mktemp -d new.XXXXXX); trap "rm -rf '$LAB/$new'" EXIT
    gcc -Wall -O2 -o "$new/verbs-agent" "$HERE/verbs-agent.c" -libverbs
    gcc -Wall -O2 -o "$new/cm-agent" "$HERE/cm-agent.c" -lrdmacm -libverbs
    gcc -Wall -O2 -o "$new/host-agent" "$HERE/host-agent.c"
    cp "$HERE/guest.sh" "$new/"
    mv "$new"/* .
    echo "$stamp" > agents-ready
}

STAMP=$(sha256sum < "$HERE/setup.sh" | cut -c1-16)
[ "$(cat ready 2>/dev/null)" = "$STAMP" ] && { agents; exit 0; }
[ -z "$IN_USE" ] || { echo "$LAB has to be prepared anew (setup.sh has changed), but another run uses it" >&2; exit 1; }
[ "$(id -u)" = 0 ] || { echo "the lab needs root (network namespaces, taps, packages)" >&2; exit 1; }

rm -rf ready agents-ready new.*
# The archive may refuse a connection, and another run may be installing.
PATIENT="-o Acquire::Retries=3 -o DPkg::Lock::Timeout=300"
apt-get update -q $PATIENT >/dev/null </dev/null
KV=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: linux-image-//p' | head -1)
SRC=linux-source-$(echo "$KV" | cut -d. -f1,2)
# A qemu-utils of backports excludes the distribution's qemu: then it has to be the distribution's, too.
UTILS=qemu-utils
apt-get install -s -q qemu-system-x86 qemu-utils >/dev/null 2>&1 </dev/null || UTILS=qemu-utils/$(. /etc/os-release; echo "$VERSION_CODENAME")
# A compiler that is there is left alone: somebody may be using it.
TOOLS=
command -v make >/dev/null || TOOLS+=" make"
command -v gcc >/dev/null && [ -e /usr/include/stdio.h ] || TOOLS+=" gcc libc6-dev"
DEBIAN_FRONTEND=noninteractive apt-get install -y -q $PATIENT --no-install-recommends --allow-downgrades \
    qemu-system-x86 "$UTILS" busybox-static kmod cpio iproute2 tcpdump e2fsprogs \
    rdma-core ibverbs-utils ibverbs-providers rdmacm-utils libibverbs-dev librdmacm-dev perftest \
    "linux-headers-$KV" "$SRC" libelf-dev $TOOLS \
    openssh-client dropbear-bin >/dev/null </dev/null
echo "$KV" > kernel-version

# The kernel is only unpacked: what this machine boots stays as it is.
rm -rf kernel deb; mkdir deb; chmod 777 deb
(cd deb && apt-get download -q $PATIENT "linux-image-$KV" >/dev/null)
dpkg -x deb/*.deb kernel; rm -rf deb
depmod -b kernel "$KV"

rm -rf src rtrs rnbd; mkdir src
tar -C src --strip-components=1 -xf "/usr/src/$SRC.tar.xz" "$SRC/drivers/infiniband/ulp/rtrs" "$SRC/drivers/block/rnbd"
mv src/drivers/infiniband/ulp/rtrs rtrs; mv src/drivers/block/rnbd rnbd; rm -rf src
sed -i "s#-I\$(srctree)/drivers/infiniband/ulp/rtrs#-I$LAB/rtrs#" rnbd/Makefile
build() { make -s -C "/usr/src/linux-headers-$KV" "$@" modules 2>&1 | grep -v 'Skipping BTF' || true; }
build M="$LAB/rtrs" CONFIG_INFINIBAND_RTRS=m CONFIG_INFINIBAND_RTRS_CLIENT=m CONFIG_INFINIBAND_RTRS_SERVER=m
build M="$LAB/rnbd" KBUILD_EXTRA_SYMBOLS="$LAB/rtrs/Module.symvers" CONFIG_BLK_DEV_RNBD_CLIENT=m CONFIG_BLK_DEV_RNBD_SERVER=m
for ko in rtrs/rtrs-{core,client,server}.ko rnbd/rnbd-{client,server}.ko; do
    [ -e "$ko" ] || { echo "building $ko failed" >&2; exit 1; }
done
agents

# initramfs: busybox, the virtio and 9p modules, and an init that moves into this machine's own root folder
# (read-only through 9p, a tmpfs overlay on top), with this folder as /ferroce-lab, then runs the guest script.
rm -rf ird; mkdir -p ird/{bin,proc,sys,dev,lib/modules,newroot,ro,rw}; cp /bin/busybox ird/bin/
i=10
for f in $(for m in virtio_pci virtio_net 9p 9pnet_virtio overlay; do
        modprobe -d kernel -S "$KV" --show-depends $m; done | awk '/^insmod/ && !seen[$2]++ {print $2}'); do
    cp "$f" "ird/lib/modules/$i-$(basename "$f")"; i=$((i+1))
done
cat > ird/init <<INIT
#!/bin/busybox sh
B=/bin/busybox
\$B mount -t proc p /proc; \$B mount -t sysfs s /sys; \$B mount -t devtmpfs d /dev
for f in /lib/modules/*.ko; do \$B insmod \$f || echo "cannot load \$f"; done
\$B mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 root /ro
\$B mount -t tmpfs t /rw; \$B mkdir -p /rw/u /rw/w
\$B mount -t overlay -o lowerdir=/ro,upperdir=/rw/u,workdir=/rw/w o /newroot
CL=\$(\$B cat /proc/cmdline)
for d in proc sys dev; do \$B mount --move /\$d /newroot/\$d; done
L=/ferroce-lab; \$B mkdir -p /newroot/\$L
\$B mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 lab /newroot/\$L
\$B mkdir -p /newroot/lib/modules; \$B mount --bind /newroot/\$L/kernel/lib/modules /newroot/lib/modules
\$B mount -t tmpfs t /newroot/run; \$B mount -t tmpfs t /newroot/tmp
\$B mkdir -p /newroot/dev/pts /newroot/dev/shm; \$B mount -t devpts d /newroot/dev/pts; \$B mount -t tmpfs s /newroot/dev/shm
for w in \$CL; do case \$w in gid=*) GUEST_ID=\${w#gid=};; gmtu=*) GUEST_MTU=\${w#gmtu=};; esac; done
export LAB=\$L GUEST_ID GUEST_MTU PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
\$B chroot /newroot /bin/bash \$L/guest.sh
echo "guest script ended: \$?"
\$B poweroff -f
INIT
chmod +x ird/init
(cd ird && find . | cpio -o -H newc 2>/dev/null | gzip -1 > ../initramfs.gz)
rm -rf ird
echo "$STAMP" > ready
