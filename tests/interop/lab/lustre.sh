#!/bin/bash
# Makes the folder lustre-SERIES of a lab, for the kernel in linux-SERIES: the modules libcfs, lnet, ko2iblnd and lnet_selftest, and the
# programs lctl, lnetctl and lst, built from a copy of a checkout of Lustre. The checkout stays as it is.
#
#   lustre.sh LAB SERIES CHECKOUT [in-use]        for setup.sh
#
# A second call with the same sources does nothing. The last line on standard error says what went wrong. SIGTERM ends it after the
# present step.
set -euo pipefail
trap 'exit 143' TERM
HERE=$(cd "$(dirname "$0")" && pwd)
LAB=$1 SERIES=$2 SOURCE=$3 IN_USE=${4:-}
. "$HERE/packages.sh"
[ -e "$SOURCE/autogen.sh" ] && [ -d "$SOURCE/lnet/klnds/o2iblnd" ] ||
    fail "$SOURCE is no checkout of Lustre: it has no autogen.sh and lnet/klnds/o2iblnd"
KV=$(cat "$LAB/linux-$SERIES/version" 2>/dev/null) || fail "there is no Linux $SERIES to build them for"

# Without safe.directory git reads no other user's checkout.
GIT="git -c safe.directory=* -C $SOURCE"
# Files of the source, from its folder: those that git has, or all of an unpacked archive.
files() {
    if [ -e "$SOURCE/.git" ]; then $GIT ls-files -z; else (cd "$SOURCE" && find . ! -type d -print0); fi
}
HASH=$( (cd "$SOURCE" && files | LC_ALL=C sort -z | xargs -0 sha256sum 2>/dev/null || true) | sha256sum)
STAMP=$( (echo "$KV $HASH"; cat "$HERE/lustre.sh" "$HERE/packages.sh") | sha256sum | cut -c1-16)
TO=$LAB/lustre-$SERIES
[ "$(cat "$TO/ready" 2>/dev/null)" != "$STAMP" ] || exit 0
[ -z "$IN_USE" ] || fail "they have to be built anew, but another run uses the lab's folder"

WANTED=
for package in autoconf automake bison flex gcc libc6-dev libelf-dev libkeyutils-dev libmount-dev libnl-3-dev libnl-genl-3-dev \
    libreadline-dev libssl-dev libtool libyaml-dev m4 make pkg-config zlib1g-dev; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' $package 2>/dev/null)" = installed ] || WANTED+=" $package"
done
update || true
[ -z "$WANTED" ] || DEBIAN_FRONTEND=noninteractive apt-get install -y -q $PATIENT --no-install-recommends $WANTED >/dev/null </dev/null ||
    fail "this host lacks packages that can't be installed:$WANTED"

rm -rf "$TO"; mkdir "$TO"; cd "$TO"
LOG=$TO/build.log
# Runs a step of the build.
step() { "$@" >> "$LOG" 2>&1 </dev/null || { tail -20 "$LOG" >&2; fail "building LNet for Linux $KV failed at: $* (all of it is in $LOG)"; }; }
headers "$KV"
# BTF would need pahole.
sed -i '/^CONFIG_DEBUG_INFO_BTF_MODULES=/d' "$BUILD/include/config/auto.conf"
mkdir src
(cd "$SOURCE" && files | tar --create --null --files-from=- --ignore-failed-read 2>/dev/null) | tar -x -C src
cd src
# Nothing of Lustre itself.
sed -i '/^obj-m += lustre/d' Kbuild
step bash autogen.sh
step ./configure --with-linux="$BUILD" --with-linux-obj="$BUILD" --with-o2ib=yes --disable-shared \
    --disable-server --disable-tests --disable-manpages --disable-iokit --disable-gss --disable-crypto
step make -j"$(nproc)" modules lib lnet/utils
step make -j"$(nproc)" -C lustre/utils lctl
for built in lnet/{libcfs/libcfs,lnet/lnet,klnds/*o2iblnd/ko2iblnd,selftest/lnet_selftest}.ko lnet/utils/{lnetctl,lst} lustre/utils/lctl; do
    [ -e $built ] || fail "building LNet for Linux $KV has not made $built (all of it is in $LOG)"
    mv $built "$TO"
done
cd "$TO"
strip --strip-debug *.ko
VERSION=$(sed -n 's/^DEFAULT_VERSION=//p' "$SOURCE/LUSTRE-VERSION-GEN")
REVISION=$($GIT describe --always --dirty 2>/dev/null) || REVISION=
echo "Lustre $VERSION${REVISION:+, $REVISION}" > version
rm -rf src headers
echo "$STAMP" > ready
