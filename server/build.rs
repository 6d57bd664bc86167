//! Sets the library search path of the binary: first `../lib` relative to the binary, as in the image, and then the
//! directory that contained the OpenVINO libraries at build time.

fn main() {
    if let Ok(libraries) = std::env::var("DEP_OVFLEET_SHIM_LIBRARIES") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,$ORIGIN/../lib:{libraries}");
    }
}
