#!/usr/bin/env bash
# Sets up what vkback needs and does not find: a Vulkan loader and driver, a shader compiler, and a virtual environment with vkback in it.
#
#   tools/setup.sh [bench|test|dev]     bench: to run; test: and the tests; dev: and the linters
#
# System packages come from apt, as root or through sudo, and only those that are missing. Elsewhere, it says what to install and stops.
# A second run finds all in place and takes a fraction of a second.
# Environment: PYTHON (default python3), VENV (default .venv).
set -euo pipefail
cd "$(dirname "$0")/.."

goal=${1:-bench}
python=${PYTHON:-python3}
venv=${VENV:-.venv}

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

case $goal in
    bench) extras= ;;
    test) extras='[test]' ;;
    dev) extras='[test,dev]' ;;
    *) die "unknown goal '$goal': expected bench, test or dev" ;;
esac

have_library() { "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1" 2>/dev/null; }

# Homebrew's folder depends on the processor, and macOS looks for no library in that of Apple's.
homes=$(printf '%s\n' "${HOMEBREW_PREFIX:-}" /opt/homebrew /usr/local | grep . | uniq)

# A library of a Mac by name, also where the system does not look: in the SDK, in Homebrew's folders.
have_dylib() {
    local dir
    have_library "$1" && return 0
    for dir in ${VULKAN_SDK:+"$VULKAN_SDK"} $homes; do
        [ -e "$dir/lib/$1" ] && return 0
    done
    return 1
}

# Where the loader looks for files of the given kind (icd.d, explicit_layer.d), first the variables that override it.
have_vulkan_file() {
    local kind=$1 pattern=$2 dir prefix brewed= data=${XDG_DATA_DIRS:-/usr/local/share:/usr/share}
    for prefix in ${VULKAN_SDK:+"$VULKAN_SDK"} $homes; do brewed+=:$prefix/share:$prefix/etc; done
    local IFS=:
    for dir in $data /etc "${XDG_DATA_HOME:-$HOME/.local/share}" ${brewed#:}; do
        compgen -G "$dir/vulkan/$kind/$pattern" >/dev/null && return 0
    done
    return 1
}

have_driver() { [ -n "${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-}" ] || have_vulkan_file icd.d '*.json'; }

have_compiler() {
    command -v glslc >/dev/null || have_library libshaderc_shared.so.1 || have_library libshaderc.so.1 || have_dylib libshaderc_shared.dylib
}

command -v "$python" >/dev/null || die "$python not found: vkback needs Python 3.11 or newer"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$("$python" --version) is too old: vkback needs Python 3.11 or newer. Set PYTHON to one, as in: make bench PYTHON=python3.11"

missing=()
have_library libvulkan.so.1 || have_dylib libvulkan.1.dylib || missing+=(loader)
have_driver || missing+=(driver)
have_compiler || missing+=(compiler)
"$python" -c 'import ensurepip, venv' 2>/dev/null || [ -x "$venv/bin/pip" ] || missing+=(venv)
[ "$goal" = bench ] || have_vulkan_file explicit_layer.d '*khronos_validation*.json' || missing+=(validation)

package_for() {  # manager, what is missing
    case $1:$2 in
        apt:loader) echo libvulkan1 ;;
        apt:driver) echo mesa-vulkan-drivers ;;
        apt:compiler) echo glslc ;;
        apt:venv) echo python3-venv ;;
        apt:validation) echo vulkan-validationlayers ;;
        dnf:loader) echo vulkan-loader ;;
        dnf:driver) echo mesa-vulkan-drivers ;;
        dnf:compiler) echo glslc ;;
        dnf:venv) echo python3 ;;
        dnf:validation) echo vulkan-validation-layers ;;
        pacman:loader) echo vulkan-icd-loader ;;
        pacman:driver) echo vulkan-swrast ;;
        pacman:compiler) echo shaderc ;;
        pacman:venv) echo python ;;
        pacman:validation) echo vulkan-validation-layers ;;
        zypper:loader) echo libvulkan1 ;;
        zypper:driver) echo libvulkan_lvp ;;
        zypper:compiler) echo shaderc ;;
        zypper:venv) echo python3 ;;
        zypper:validation) echo vulkan-validationlayers ;;
        apk:loader) echo vulkan-loader ;;
        apk:driver) echo mesa-vulkan-swrast ;;
        apk:compiler) echo shaderc ;;
        apk:venv) echo python3 ;;
        apk:validation) echo vulkan-validation-layers ;;
        brew:loader) echo vulkan-loader ;;
        brew:driver) echo molten-vk ;;
        brew:compiler) echo shaderc ;;
        brew:venv) echo python ;;
        brew:validation) echo vulkan-validationlayers ;;
    esac
}

packages_for() {  # manager
    local part
    for part in "${missing[@]}"; do package_for "$1" "$part"; done | tr '\n' ' ' | sed 's/ $//'
}

install_missing() {
    local root=() log
    log=$(mktemp)
    # shellcheck disable=SC2064  # the name as it is now
    trap "rm -f '$log'" EXIT
    if [ -n "${TERMUX_VERSION:-}" ]; then
        die "missing: ${missing[*]}. In Termux, pip has no numpy, pandas, cffi and tokenizers: set vkback up in a Debian of its own, with:" \
            "pkg install proot-distro && proot-distro install debian && proot-distro login debian"
    elif command -v apt-get >/dev/null; then
        local packages
        packages=$(packages_for apt)
        if [ "$(id -u)" -ne 0 ]; then
            if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
                root=(sudo)
            else
                die "missing: ${missing[*]}. This needs root: apt-get install $packages"
            fi
        fi
        say "installing $packages"
        # Lists that cannot be renewed, as those of another source that has expired, may still have the packages.
        "${root[@]}" apt-get update -qq >"$log" 2>&1 || say "apt-get update failed; trying with the lists that are there"
        # shellcheck disable=SC2086  # one word a package
        "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $packages >>"$log" 2>&1 ||
            { tail -n 20 "$log" >&2; die "apt-get (its last lines are above) could not install: $packages"; }
    elif command -v dnf >/dev/null; then
        die "missing: ${missing[*]}. Install them with: sudo dnf install $(packages_for dnf)"
    elif command -v pacman >/dev/null; then
        die "missing: ${missing[*]}. Install them with: sudo pacman -S $(packages_for pacman)"
    elif command -v zypper >/dev/null; then
        die "missing: ${missing[*]}. Install them with: sudo zypper install $(packages_for zypper)"
    elif command -v apk >/dev/null; then
        [ "$goal" = bench ] || say "Alpine: llguidance has no wheel for musl, pip compiles it: the tests need cargo and rust, too"
        die "missing: ${missing[*]}. Install them as root with: apk add $(packages_for apk)"
    elif command -v brew >/dev/null; then
        die "missing: ${missing[*]}. Install them with: brew install $(packages_for brew)"
    else
        die "missing: ${missing[*]}. Wanted: a Vulkan loader (libvulkan), a Vulkan driver, glslc or libshaderc, python3 with venv," \
            "for the tests also the Khronos validation layers; the Vulkan SDK has all but the driver"
    fi
}

[ ${#missing[@]} -eq 0 ] || install_missing

# The stamp holds what the environment was made from; the widest goal reached stays, so that bench after test has nothing to do.
stamp=$venv/.vkback-setup
key=$("$python" -c 'import hashlib, pathlib, sys
print(hashlib.sha256(pathlib.Path("pyproject.toml").read_bytes() + sys.version.encode()).hexdigest()[:16], pathlib.Path().resolve())')
case $goal in
    bench) enough='bench|test|dev' ;;
    test) enough='test|dev' ;;
    dev) enough='dev' ;;
esac
if [ -x "$venv/bin/python" ] && grep -Eqx "($enough) $key" "$stamp" 2>/dev/null; then
    exit 0
fi

if [ ! -x "$venv/bin/pip" ]; then
    say "creating $venv"
    "$python" -m venv --clear "$venv" || die "$python -m venv failed"
fi
say "installing vkback$extras into $venv"
# --no-compile: a tenth of the modules is ever imported, and Python compiles those then; for all it takes 8 s.
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile --editable ".$extras" ||
    die "pip could not install vkback's dependencies into $venv (its message is above); it needs to reach a Python package index"
printf '%s %s\n' "$goal" "$key" >"$stamp"
