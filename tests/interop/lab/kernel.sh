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
. "$(dirname "$0")/packages.sh"

# What this distribution does not have comes from the backports of the next one. Their package lists are kept here and nowhere
# else.
NEXT=
case $SERIES in 7.*) NEXT=trixie;; esac
if [ -n "$NEXT" ]; then
    site=$(apt-get indextargets --format '$(LABEL) $(REPO_URI)' 'Created-By: Packages' | sed -n 's/^Debian //p' | head -1)
    [ -n "$site" ] || fail "apt knows no archive of Debian's that could have $NEXT-backports"
    mkdir -p apt/lists/partial apt/cache/archives/partial
    key=/usr/share/keyrings/debian-archive-keyring.gpg
    printf "deb [signed-by=$key] $site %s main\n" "$NEXT" "$NEXT-backports" > apt/sources.list
    : > apt/status
    cat > apt/conf <<CONF
Dir::Etc::SourceList "$PWD/apt/sources.list"; Dir::Etc::SourceParts "-"; Dir::State::Status "$PWD/apt/status";
Dir::State::Lists "$PWD/apt/lists"; Dir::Cache "$PWD/apt/cache"; Acquire::Languages "none"; APT::Sandbox::User "root";
CONF
    export APT_CONFIG=$PWD/apt/conf
    said=$(apt-get update -q --error-on=any $PATIENT 2>&1 </dev/null) ||
        fail "no package lists of $NEXT-backports: $(tail -1 <<< "$said")"
    # Backports have several series, and their package for the newest kernel may be of a later one.
    KV=$(apt-cache pkgnames "linux-image-$SERIES." | sed -n -E 's/^linux-image-([0-9.]+\+deb[0-9]+-amd64)$/\1/p' | sort -V | tail -1)
    [ -n "$KV" ] || fail "$NEXT-backports has no kernel of $SERIES (no package linux-image-$SERIES.*-amd64)"
else
    # Debian's kernel, or the second one that it offers (bookworm: 6.12 in its security archive).
    KV=
    for meta in linux-image-amd64 "linux-image-$SERIES-amd64"; do
        name=$(apt-cache depends "$meta" 2>/dev/null | sed -n 's/.*Depends: linux-image-//p' | head -1)
        case $name in "$SERIES".*) KV=$name; break;; esac
    done
    [ -n "$KV" ] || fail "the package archive has no kernel of $SERIES (neither linux-image-amd64 nor linux-image-$SERIES-amd64)"
fi

IMAGE=linux-image-$KV
unpack kernel "$IMAGE" $(parts "$IMAGE" 'base|binary|modules')
# 7.x has modules and image elsewhere, in packages of their own.
[ -e kernel/lib ] || ln -s usr/lib kernel/lib
[ -e "kernel/boot/vmlinuz-$KV" ] || { mkdir -p kernel/boot; ln -s "../lib/modules/$KV/vmlinuz" "kernel/boot/vmlinuz-$KV"; }
[ -e "kernel/boot/vmlinuz-$KV" ] || fail "$IMAGE has no vmlinuz"
depmod -b kernel "$KV"

# The modules are built in $OUT, which is $IN for those who build.
HEADERS=linux-headers-$KV
if [ -n "$NEXT" ]; then
    # The compiler of these headers does not run on this distribution: a root folder with it and what else make takes.
    apt-get install -q -y --download-only --no-install-recommends $PATIENT "$HEADERS" \
        bash binutils coreutils dash diffutils findutils grep make mawk sed >/dev/null </dev/null || fail "no package $HEADERS can be had"
    mkdir -p headers/usr/{bin,lib,lib64,sbin} headers/{dev,proc,tmp}
    for n in bin lib lib64 sbin; do ln -s usr/$n headers/$n; done
    for package in apt/cache/archives/*.deb; do dpkg -x "$package" headers; done
    [ -e headers/usr/bin/awk ] || ln -s mawk headers/usr/bin/awk
    mknod -m 666 headers/dev/null c 1 3
    OUT=headers/build IN=/build BUILD=/usr/src/$HEADERS
    # objtool reads /proc.
    inside() { unshare --mount --pid --fork --root=headers --mount-proc "$@"; }
else
    headers "$KV"
    OUT=build IN=$PWD/build
    inside() { "$@"; }
fi

SRC=linux-source-$SERIES
unpack src "$SRC"
tar -C src --strip-components=1 -xf "src/usr/src/$SRC.tar.xz" "$SRC/drivers/infiniband/ulp/rtrs" "$SRC/drivers/block/rnbd"
mkdir -p "$OUT"; mv src/drivers/infiniband/ulp/rtrs src/drivers/block/rnbd "$OUT"; rm -rf src
sed -i "s#-I\$(srctree)/drivers/infiniband/ulp/rtrs#-I$IN/rtrs#" "$OUT/rnbd/Makefile"
# BTF would need pahole, and nobody looks at it here.
build() { inside make -s -C "$BUILD" CONFIG_DEBUG_INFO_BTF_MODULES= "$@" modules >> build.log 2>&1 || true; }
build M="$IN/rtrs" CONFIG_INFINIBAND_RTRS=m CONFIG_INFINIBAND_RTRS_CLIENT=m CONFIG_INFINIBAND_RTRS_SERVER=m
build M="$IN/rnbd" KBUILD_EXTRA_SYMBOLS="$IN/rtrs/Module.symvers" CONFIG_BLK_DEV_RNBD_CLIENT=m CONFIG_BLK_DEV_RNBD_SERVER=m
mv "$OUT/rtrs" "$OUT/rnbd" .
for ko in rtrs/rtrs-{core,client,server}.ko rnbd/rnbd-{client,server}.ko; do
    [ -e "$ko" ] || { tail -20 build.log >&2; fail "building $ko failed"; }
done
rm -rf headers build apt

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
