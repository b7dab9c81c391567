#!/usr/bin/env bash
# Installs PufferLib's C environments into the virtual environment that runs this: `bash install_pufferlib.sh .venv/bin/python`.
# The release exists as source only, and its setup.py downloads raylib for the web and Box2D from a code host, even
# when nothing uses them. What follows needs the package index and gcc alone:
#   - fetch the source archive without running its setup.py, and check its sha256;
#   - make the folders whose absence would start a download (raylib for Linux is inside the archive);
#   - drop impulse_wars, the one environment that needs Box2D;
#   - apply pufferlib.patch, which says what it changes, and add adapters.py (PATCH=0 leaves PufferLib as released, for
#     the benchmark's peers);
#   - NO_TRAIN=1 leaves out PufferLib's own trainer, its torch extension and its heavy requirements
#     (NO_TRAIN=0 bash install_pufferlib.sh ... builds the extension; only the benchmark's peers need it).
# A second argument is a folder to keep the wheel in, and to take it from the next time.
set -euo pipefail
export NO_TRAIN=${NO_TRAIN:-1}
PATCH=${PATCH:-1}
python=$(realpath --no-symlinks "${1:?usage: install_pufferlib.sh PYTHON [WHEEL_FOLDER]}")
version=3.0.0
here=$(dirname "$0")
# What the wheel is called, and what is looked for: one of other changes is replaced.
patched=$version+lstm$(cat "$here"/{pufferlib.patch,adapters.py} | sha256sum | head -c 8)
[ "$PATCH" = 1 ] || patched=$version+released
sha256=7df3a3e3f5f894d78d2a1f5374097890aec01473183e748abefe4f3faa10eaa9
fail() { echo "install_pufferlib.sh: $*" >&2; exit 1; }

if "$python" -c "import importlib.metadata as m; raise SystemExit(m.version('pufferlib') != '$patched')" 2>/dev/null; then
    exit 0
fi
[ "$(uname -s)" = Linux ] || fail "PufferLib's C environments are built for Linux here; on $(uname -s) follow PufferLib's own instructions"
command -v gcc >/dev/null || fail "no C compiler; on Debian or Ubuntu: sudo apt-get install gcc libc6-dev"
command -v patch >/dev/null || fail "no patch; on Debian or Ubuntu: sudo apt-get install patch"
include=$("$python" -c "import sysconfig; print(sysconfig.get_paths()['include'])")
[ -f "$include/Python.h" ] || fail "no Python.h in $include; on Debian or Ubuntu: sudo apt-get install python3-dev"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if "$python" -c "import pip" 2>/dev/null; then
    install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }
else
    command -v uv >/dev/null || fail "$python has no pip, and there is no uv on the PATH"
    install() { uv pip install --quiet --python "$python" "$@"; }
fi
wheels=${2:-$work/dist}
wheel() { install --no-deps --no-index --find-links "$wheels" "pufferlib==$patched"; }
wheel 2>/dev/null && exit 0  # none yet, or of other Pythons
install wheel==0.45.1 Cython==3.1.4 unearth==0.18.3

echo "building PufferLib $version from its source release (about a minute)"
"$python" -m unearth "pufferlib==$version" --no-binary --download "$work" >"$work/unearth.log" 2>&1 ||
    fail "the package index gave no pufferlib $version: $(tail -n 1 "$work/unearth.log")"
echo "$sha256  $work/pufferlib-$version.tar.gz" | sha256sum --check --quiet ||
    fail "pufferlib-$version.tar.gz is not the release this script knows (sha256 differs)"
tar -xzf "$work/pufferlib-$version.tar.gz" -C "$work"
source=$work/pufferlib-$version
mkdir "$source"/{raylib-5.5_webassembly,box2d-web,box2d-linux-amd64}
rm -r "$source/pufferlib/ocean/impulse_wars"
if [ "$PATCH" = 1 ]; then
    patch --directory "$source" --strip 1 --quiet <"$here/pufferlib.patch"
    cp "$here/adapters.py" "$source/pufferlib"
fi
sed -i "s/^version = .*/version = \"$patched\"/" "$source/pyproject.toml"
mkdir -p "$wheels" && wheels=$(realpath "$wheels")
(
    cd "$source"
    # With nvcc on the PATH the trainer's extension is built for CUDA, which fails where the rest of CUDA is not set up.
    [ "$NO_TRAIN" = 1 ] || command -v nvidia-smi >/dev/null || { unset CUDA_HOME; export PATH=/usr/bin:/bin; }
    LDFLAGS=-s exec "$python" -c "import setuptools.build_meta; setuptools.build_meta.build_wheel('$wheels')"
) >"$work/build.log" 2>&1 ||
    { tail -n 30 "$work/build.log" >&2; fail "the build failed; its last lines stand above"; }
wheel
