//! What is said of this machine.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use kvdock_cuda::{Arithmetic, Probe, Search, open};

#[test]
fn what_is_missing_is_said_in_words() {
    // Driver and GPU are the machine's, the compiler is nowhere.
    let search = Search::below(Path::new("/nowhere"), &|_| None);
    let probe = Probe::new(&search);
    let rows = probe.rows();
    let row = |name: &str| rows.iter().find(|(known, _)| *known == name).unwrap().1.as_str();
    let missing = probe.usable().unwrap_err();
    assert_eq!(row("cuda"), format!("no CUDA: {missing}"));
    assert!(row("cuda compiler").starts_with("missing: no NVRTC"), "{rows:?}");
    assert!(row("cublas").starts_with("none found"), "{rows:?}");
    match &probe.driver {
        Err(reason) => {
            assert!(missing.starts_with(reason.as_str()), "{missing}");
            assert_eq!(row("cuda driver"), format!("missing: {reason}"));
            let error = open(&search, 0, Arithmetic::Reproducible).err().unwrap().to_string();
            assert_eq!(error, format!("CUDA: {missing}"));
        }
        Ok((_, gpus)) => {
            assert_eq!(rows.iter().filter(|(name, _)| *name == "gpu").count(), gpus.len());
            let error = open(&search, 1_000, Arithmetic::Reproducible).err().unwrap().to_string();
            assert!(error.starts_with("CUDA: "), "{error}");
        }
    }
}
