#!/bin/sh
# Uses the wheel in the virtual environment where it is installed, and removes it.
# wheel.sh VENV PACKAGES; prints lines as check.sh does.
set -u
venv=$1
export FERROCE_PACKAGES=$2
here=$(cd "$(dirname "$0")" && pwd)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export FERROCE_BROKER_LINGER=1 PATH="$venv/bin:$PATH"

check() {
    name=$1
    shift
    if "$@" >"$log" 2>&1; then
        echo "ok wheel: $name"
    else
        echo "FAILED wheel: $name: $(tail -n 25 "$log" | tr '\n' '/')"
    fi
}

# Runs a program where nothing else has the port.
alone() {
    unshare --net sh -c 'ip link set lo up && exec "$@"' sh "$@"
}

# Python itself, without a package for verbs.
python_sees_devices() {
    ferroce run -- python - <<'END'
import ctypes
verbs = ctypes.CDLL("libibverbs.so.1")
count = ctypes.c_int()
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
devices = verbs.ibv_get_device_list(ctypes.byref(count))
verbs.ibv_get_device_name.restype = ctypes.c_char_p
verbs.ibv_get_device_name.argtypes = [ctypes.c_void_p]
assert count.value >= 1, count.value
assert verbs.ibv_get_device_name(devices[0]).startswith(b"ferroce"), "another library"
END
}

removed() {
    pip uninstall --quiet --yes ferroce && ! find "$venv" -mindepth 1 -name '*ferroce*' | grep .
}

check 'the program is in the environment' sh -c 'command -v ferroce | grep -q "$1" && ferroce --version' sh "$venv"
check 'python -m ferroce' python -m ferroce --version
check 'a Python program sees devices' python_sees_devices
check 'pytest with one host and with two' alone pytest -q -p no:cacheprovider "$here/test_fixtures.py"
# An ordinary user makes namespaces in one of users.
user='setpriv --reuid=65534 --regid=65534 --clear-groups env HOME=/tmp PYTHONDONTWRITEBYTECODE=1'
cp "$here/test_fixtures.py" "$venv"
if $user unshare --user --map-root-user --net true 2>/dev/null; then
    # shellcheck disable=SC2086
    check 'pytest as another user' alone $user pytest -q -p no:cacheprovider "$venv/test_fixtures.py"
else
    echo 'NOT RUN wheel: pytest as another user: users may make no namespaces'
fi
rm "$venv/test_fixtures.py"
check 'examples and GitHub Action' alone pytest -q -p no:cacheprovider "$here/test_examples.py"
check 'is removed without a trace' removed
