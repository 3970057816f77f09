#!/bin/sh
# Installs a release below the runner's folder of tools and puts it into the PATH of later steps.
# FERROCE_VERSION (with or without v), FERROCE_URL (folder of the release's files; file:// works), FERROCE_EVERYWHERE (true or false).
set -eu
version=${FERROCE_VERSION#v}
case $version in
[0-9]*) ;;
*)
    echo "::error::ferroce: '$version' is no version; use the action by a tag such as v0.1.0, or give it a version" >&2
    exit 1
    ;;
esac
name=ferroce-$version-$(uname -m)-linux
prefix=${RUNNER_TOOL_CACHE:-${RUNNER_TEMP:-/tmp}}/$name
if [ ! -x "$prefix/bin/ferroce" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    for file in "$name.tar.gz" SHA256SUMS; do
        curl --fail --silent --show-error --location --retry 3 --output "$work/$file" "$FERROCE_URL/$file"
    done
    (cd "$work" && grep "  $name.tar.gz\$" SHA256SUMS | sha256sum --check --strict -)
    tar -C "$work" -xzf "$work/$name.tar.gz"
    mkdir -p "$(dirname "$prefix")"
    mv "$work/$name" "$prefix"
fi
echo "$prefix/bin" >>"$GITHUB_PATH"
echo "prefix=$prefix" >>"$GITHUB_OUTPUT"
if [ "${FERROCE_EVERYWHERE:-false}" = true ]; then
    {
        echo "LD_LIBRARY_PATH=$prefix/lib/ferroce${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        echo "FERROCE_BROKER=$prefix/bin/ferroce"
    } >>"$GITHUB_ENV"
fi
"$prefix/bin/ferroce" --version
