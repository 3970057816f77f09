#!/bin/bash
# Makes the folder linux-SERIES of a lab: a stock Debian kernel of that series, as the package archive has it, and the RTRS
# and RNBD modules (which Debian's configuration leaves out), built from Debian's own source of that kernel. All packages
# are unpacked there only: what this machine has installed, and what it boots, stays as it is.
#
#   kernel.sh LAB SERIES        for setup.sh
#
# The last line on standard error says what went wrong. SIGTERM ends it after the present step.
set -euo pipefail
trap 'exit 143' TERM
LAB=$1 SERIES=$2
mkdir -p "$LAB/linux-$SERIES"; cd "$LAB/linux-$SERIES"
fail() { echo "$1" >&2; exit 1; }

# Debian's kernel, or the second one that it offers (bookworm: 6.12 in its security archive).
KV=
for meta in linux-image-amd64 "linux-image-$SERIES-amd64"; do
    name=$(apt-cache depends "$meta" 2>/dev/null | sed -n 's/.*Depends: linux-image-//p' | head -1)
    case $name in "$SERIES".*) KV=$name; break;; esac
done
[ -n "$KV" ] || fail "the package archive has no kernel of $SERIES (neither linux-image-amd64 nor linux-image-$SERIES-amd64)"

# Unpacks packages into a folder.
unpack() {
    local to=$1 package; shift
    rm -rf deb; mkdir deb; chmod 777 deb
    (cd deb && apt-get download -q $PATIENT "$@" >/dev/null </dev/null) || fail "no package $* can be had"
    for package in deb/*.deb; do dpkg -x "$package" "$to"; done
    rm -rf deb
}
unpack kernel "linux-image-$KV"
depmod -b kernel "$KV"

HEADERS=linux-headers-$KV
unpack headers "$HEADERS" $(apt-cache depends "$HEADERS" | sed -n -E 's/.*Depends: (linux-(headers|kbuild)-.*)/\1/p')
BUILD=$PWD/headers/usr/src/$HEADERS
sed -i "s#/usr/src/#$PWD/headers/usr/src/#g" "$BUILD/Makefile"
# The compiler that the kernel was built with.
CC=$(sed -n -E 's/.*(gcc-[0-9]+).*/\1/p' "$BUILD/.kernelvariables" | head -1)
[ -z "$CC" ] || command -v "$CC" >/dev/null ||
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q $PATIENT --no-install-recommends "$CC" >/dev/null </dev/null

SRC=linux-source-$SERIES
unpack src "$SRC"
tar -C src --strip-components=1 -xf "src/usr/src/$SRC.tar.xz" "$SRC/drivers/infiniband/ulp/rtrs" "$SRC/drivers/block/rnbd"
mv src/drivers/infiniband/ulp/rtrs rtrs; mv src/drivers/block/rnbd rnbd; rm -rf src
sed -i "s#-I\$(srctree)/drivers/infiniband/ulp/rtrs#-I$PWD/rtrs#" rnbd/Makefile
# BTF would need pahole, and nobody looks at it here.
build() { make -s -C "$BUILD" CONFIG_DEBUG_INFO_BTF_MODULES= "$@" modules >> build.log 2>&1 || true; }
build M="$PWD/rtrs" CONFIG_INFINIBAND_RTRS=m CONFIG_INFINIBAND_RTRS_CLIENT=m CONFIG_INFINIBAND_RTRS_SERVER=m
build M="$PWD/rnbd" KBUILD_EXTRA_SYMBOLS="$PWD/rtrs/Module.symvers" CONFIG_BLK_DEV_RNBD_CLIENT=m CONFIG_BLK_DEV_RNBD_SERVER=m
for ko in rtrs/rtrs-{core,client,server}.ko rnbd/rnbd-{client,server}.ko; do
    [ -e "$ko" ] || { tail -20 build.log >&2; fail "building $ko failed"; }
done
rm -rf headers

# initramfs: busybox, the virtio and 9p modules, and an init that moves into this machine's own root folder
# (read-only through 9p, a tmpfs overlay on top), with the lab's folder as /ferroce-lab, then runs the guest script.
rm -rf ird; mkdir -p ird/{bin,proc,sys,dev,lib/modules,newroot,ro,rw}; cp /bin/busybox ird/bin/
i=10
for f in $(for m in virtio_pci virtio_net 9p 9pnet_virtio overlay; do
        modprobe -d kernel -S "$KV" --show-depends $m; done | awk '/^insmod/ && !seen[$2]++ {print $2}'); do
    to=ird/lib/modules/$i-$(basename "$f" .xz); i=$((i+1))
    case $f in *.xz) xz -dc "$f" > "$to";; *) cp "$f" "$to";; esac
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
\$B mkdir -p /newroot/lib/modules; \$B mount --bind /newroot/\$L/linux-$SERIES/kernel/lib/modules /newroot/lib/modules
\$B mount -t tmpfs t /newroot/run; \$B mount -t tmpfs t /newroot/tmp
\$B mkdir -p /newroot/dev/pts /newroot/dev/shm; \$B mount -t devpts d /newroot/dev/pts; \$B mount -t tmpfs s /newroot/dev/shm
for w in \$CL; do case \$w in gid=*) GUEST_ID=\${w#gid=};; gmtu=*) GUEST_MTU=\${w#gmtu=};; esac; done
export LAB=\$L LINUX=\$L/linux-$SERIES GUEST_ID GUEST_MTU PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
\$B chroot /newroot /bin/bash \$L/guest.sh
echo "guest script ended: \$?"
\$B poweroff -f
INIT
chmod +x ird/init
(cd ird && find . | cpio -o -H newc 2>/dev/null | gzip -1 > ../initramfs.gz)
rm -rf ird
echo "$KV" > version
