//! Makes a static library of the header with the C compiler, without any other crate.

use std::{env, fs, path::PathBuf, process::Command};

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(status.success(), "{command:?}: {status}");
}

fn main() {
    let header = PathBuf::from(env::var("CARGO_MANIFEST_DIR").unwrap()).join("../../../kimi_mla.h");
    let out = PathBuf::from(env::var("OUT_DIR").unwrap());
    let (source, object, library) =
        (out.join("kimi_mla.c"), out.join("kimi_mla.o"), out.join("libkimi_mla.a"));
    let text = format!("#define KIMI_MLA_IMPLEMENTATION\n#include {header:?}\n");
    fs::write(&source, text).unwrap();
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_string());
    run(Command::new(compiler).args(["-std=c99", "-O2", "-fPIC", "-c"]).arg(&source).arg("-o")
        .arg(&object));
    let _ = fs::remove_file(&library);
    run(Command::new("ar").arg("rcs").arg(&library).arg(&object));
    println!("cargo:rerun-if-changed={}", header.display());
    println!("cargo:rustc-link-search=native={}", out.display());
    println!("cargo:rustc-link-lib=static=kimi_mla");
    println!("cargo:rustc-link-lib=m");
    println!("cargo:rustc-link-lib=dl");
}
