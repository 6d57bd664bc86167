//! Builds the C++ shim against the OpenVINO that `make fetch` unpacks, and tells dependants where its
//! libraries are.

use std::env;
use std::path::PathBuf;

const SOURCES: &[&str] = &[
    "adapt.cpp",
    "compiled.cpp",
    "experts.cpp",
    "gguf.cpp",
    "merge.cpp",
    "paged.cpp",
    "rotary.cpp",
    "rows.cpp",
    "save.cpp",
    "unpack.cpp",
    "weights.cpp",
];

fn main() {
    println!("cargo:rerun-if-env-changed=OVFLEET_OPENVINO");
    println!("cargo:rerun-if-changed=shim");
    let root = env::var_os("OVFLEET_OPENVINO").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../.deps/openvino"),
        PathBuf::from,
    );
    let libraries = root.join("libs");
    let (include, library) = (root.join("include"), libraries.join("libopenvino.so"));
    for needed in [&include, &library] {
        assert!(
            needed.exists(),
            "{} is missing: run `make fetch`, or set OVFLEET_OPENVINO to an unpacked OpenVINO package \
             (the folder that holds include/ and libs/)",
            needed.display()
        );
    }
    let libraries = libraries.canonicalize().expect("invariant: the folder exists");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        // As a system folder: the warnings of OpenVINO's headers are not ours.
        .flag(format!("-isystem{}", include.display()))
        .include("shim")
        .files(SOURCES.iter().map(|source| PathBuf::from("shim").join(source)))
        .flag_if_supported("-Wno-deprecated-declarations")
        .opt_level(1)
        .compile("ovfleet_shim");
    println!("cargo:rustc-link-search=native={}", libraries.display());
    println!("cargo:rustc-link-lib=dylib=openvino");
    println!("cargo:rustc-link-lib=dylib=openvino_gguf_frontend");
    // Our own tests and examples; a dependant's build script does the same for its binaries.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", libraries.display());
    println!("cargo:libraries={}", libraries.display());
}
