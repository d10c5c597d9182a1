use super::*;

fn text(failure: Result<impl Sized, Failure>) -> String {
    match failure {
        Err(Failure(text)) => text,
        Ok(_) => panic!("expected a failure"),
    }
}

/// The folder of the API crate in this tree.
fn tree() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugin-api").canonicalize().unwrap()
}

#[test]
fn names_are_those_that_a_note_may_have() {
    for good in ["a", "my-store", "s3_cache", "0", &"x".repeat(64)] {
        assert!(check_name(good).is_ok(), "{good}");
    }
    for bad in ["", "My-Store", "a b", "a/b", "ä", "a.b", &"x".repeat(65)] {
        let text = text(check_name(bad));
        assert!(text.contains("a-z") && text.contains("--name"), "{text}");
    }
}

#[test]
fn the_name_is_the_folders_unless_it_is_given() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("deep/my-store");
    new(&dir, None, Some(&tree())).unwrap();
    let manifest: toml::Table = fs::read_to_string(dir.join("Cargo.toml")).unwrap().parse().unwrap();
    assert_eq!(manifest["package"]["name"].as_str(), Some("kvdock-plugin-my-store"));
    let source = fs::read_to_string(dir.join("src/lib.rs")).unwrap();
    assert!(source.contains("name: \"my-store\"") && !source.contains("{{"));
    assert!(fs::read_to_string(dir.join("README.md")).unwrap().contains("libkvdock_plugin_my_store.so"));

    let other = folder.path().join("Other Folder");
    assert!(text(new(&other, None, Some(&tree()))).contains("\"Other Folder\""));
    assert!(!other.exists(), "nothing is written before everything is checked");
    new(&other, Some("other"), Some(&tree())).unwrap();
}

#[test]
fn what_is_in_the_way_is_named_and_stays() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "mine").unwrap();
    assert!(text(new(&file, None, Some(&tree()))).contains("found a file"));
    let full = folder.path().join("full");
    fs::create_dir(&full).unwrap();
    for name in ["a", "b", "c", "d", "e"] {
        fs::write(full.join(name), "mine").unwrap();
    }
    let text = text(new(&full, None, Some(&tree())));
    assert!(text.contains("found a, b, c and 2 more"), "{text}");
    assert_eq!(fs::read_dir(&full).unwrap().count(), 5);
    assert_eq!(fs::read_to_string(file).unwrap(), "mine");
}

#[test]
fn an_empty_folder_that_is_there_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("empty");
    fs::create_dir(&dir).unwrap();
    new(&dir, None, Some(&tree())).unwrap();
    assert!(dir.join("src/store.rs").is_file());
}

#[test]
fn the_api_is_found_beside_and_above_the_program_and_asked_for_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("kvdock/target/release/kvdock");
    let error = text(found_api(&program));
    assert!(error.contains("--api PATH") && error.contains("kvdock-plugin-api"), "{error}");
    assert!(!error.contains(env!("CARGO_MANIFEST_DIR")), "the machine that built it knows nothing here: {error}");
    for place in ["kvdock/api", "kvdock/target/release/kvdock-plugin-api"] {
        let api = folder.path().join(place);
        fs::create_dir_all(&api).unwrap();
        let manifest = |version: &str| format!("[package]\nname = {API_CRATE:?}\nversion = {version:?}\n");
        fs::write(api.join("Cargo.toml"), manifest("77.0.0")).unwrap();
        assert!(found_api(&program).is_ok_and(|found| found != api.canonicalize().unwrap()) || place == "kvdock/api");
        fs::write(api.join("Cargo.toml"), manifest(API_VERSION)).unwrap();
        assert_eq!(found_api(&program).ok(), Some(api.canonicalize().unwrap()));
    }
}

#[test]
fn the_api_is_where_it_is_said_to_be() {
    assert_eq!(given_api(&tree()).ok(), Some(tree()));
    let folder = tempfile::tempdir().unwrap();
    let error = text(given_api(folder.path()));
    assert!(error.starts_with("--api: ") && error.contains("Cargo.toml"), "{error}");
    fs::write(folder.path().join("Cargo.toml"), "[package]\nname = \"other\"\n").unwrap();
    assert!(text(given_api(folder.path())).contains("expected the package kvdock-plugin-api"));
}

#[test]
fn a_path_with_quotes_is_still_a_manifest() {
    let line = dependency(Path::new("/a \"b\" \\c")).unwrap();
    let table: toml::Table = format!("api = {{ {line} }}").parse().unwrap();
    assert_eq!(table["api"]["path"].as_str(), Some("/a \"b\" \\c"));
}
