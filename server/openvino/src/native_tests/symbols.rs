//! Checks that the objects of the kernels define no function that another object could call by mistake.
//!
//! `kernels.cpp` is compiled once for each instruction set. If an object exported an inline function of a header, the
//! linker would choose one of several bodies for all callers, and a processor without AVX-512 could run a body that
//! uses AVX-512.

use std::path::Path;
use std::process::Command;

/// The external symbols that an object or an archive defines.
fn defined(object: &Path) -> Vec<String> {
    let output = Command::new("nm")
        .args(["--defined-only", "--extern-only", "--format=posix", "--demangle"])
        .arg(object)
        .output()
        .expect("nm is part of binutils, which g++ also needs");
    assert!(output.status.success(), "nm: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    // The lines that name members of an archive end with a colon.
    let symbols = text.lines().filter(|line| !line.is_empty() && !line.ends_with(':'));
    symbols.map(|line| line.split(' ').next().unwrap_or_default().to_owned()).collect()
}

fn assert_only_a_table(object: &Path) {
    let symbols = defined(object);
    let is_table = |symbol: &String| {
        symbol.starts_with("ovfleet::kernels_") || symbol.starts_with("ovfleet::projection::kernels_")
    };
    assert!(symbols.len() == 1 && symbols.iter().all(is_table), "{}: {symbols:?}", object.display());
}

#[test]
fn an_object_of_kernels_defines_only_its_table() {
    let mut archives = 0;
    for entry in std::fs::read_dir(env!("OVFLEET_SHIM")).unwrap() {
        let directory = entry.unwrap().path();
        let name = directory.file_name().unwrap().to_str().unwrap();
        if ["ovfleet_attention_", "ovfleet_projection_"].iter().any(|it| name.starts_with(it)) {
            assert_only_a_table(&directory.join(format!("lib{name}.a")));
            archives += 1;
        }
    }
    assert!(archives >= 2, "{archives}");
}

/// Without optimization, an object contains each inline function that it calls. The optimizer would inline most of
/// these functions.
#[test]
fn an_unoptimized_object_of_kernels_defines_only_its_table() {
    let directory = tempfile::tempdir().unwrap();
    for (kernels, tiles) in [
        ("attention/kernels/kernels", None),
        ("attention/kernels/kernels", Some("HardwareTiles")),
        ("attention/kernels/kernels", Some("ModelTiles")),
        ("projection/kernels/kernels", None),
        ("projection/kernels/amx", Some("HardwareTiles")),
        ("projection/kernels/amx", Some("ModelTiles")),
    ] {
        if tiles == Some("HardwareTiles") && !cfg!(target_arch = "x86_64") {
            continue;
        }
        let object = directory.path().join("kernels.o");
        let status = Command::new(option_env!("CXX").unwrap_or("c++"))
            .args(["-std=c++17", "-O0", "-w", "-fno-exceptions", "-c", "-DOVFLEET_KERNELS=kernels_portable"])
            .args(tiles.map(|tiles| format!("-DOVFLEET_TILES={tiles}")))
            .arg(format!("{}/shim/{kernels}.cpp", env!("CARGO_MANIFEST_DIR")))
            .arg("-o")
            .arg(&object)
            .status()
            .expect("the C++ compiler has built this crate");
        assert!(status.success());
        assert_only_a_table(&object);
    }
}
