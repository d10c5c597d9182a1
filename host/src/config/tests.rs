use std::io::Write as _;
use std::time::Duration;

use super::*;
use crate::config::{Amount, CacheMode, check_served, reference};

fn sources(text: &str) -> (tempfile::NamedTempFile, Sources) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    let sources = Sources { file: Some(file.path().to_owned()), ..Sources::default() };
    (file, sources)
}

fn config(text: &str) -> Config {
    let (_file, sources) = sources(text);
    load(&sources).unwrap().config
}

fn errors(text: &str) -> Vec<String> {
    let (_file, sources) = sources(text);
    let name = sources.file.as_ref().unwrap().display().to_string();
    match load(&sources) {
        Ok(_) => Vec::new(),
        Err(errors) => errors.0.iter().map(|error| error.to_string().replace(&name, "kvdock.toml")).collect(),
    }
}

fn with_set(set: &[&str]) -> Result<Config, String> {
    load(&Sources { set: set.iter().map(|text| (*text).to_owned()).collect(), ..Sources::default() })
        .map(|loaded| loaded.config)
        .map_err(|errors| errors.to_string())
}

fn with_env(env: &[(&str, &str)]) -> (Result<Config, String>, Vec<String>) {
    let env = env.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
    match load(&Sources { env, ..Sources::default() }) {
        Ok(loaded) => (Ok(loaded.config), loaded.warnings),
        Err(errors) => (Err(errors.to_string()), Vec::new()),
    }
}

#[test]
fn defaults_serve_on_loopback_without_storage() {
    let config = config("");
    assert_eq!(config.server.host, "127.0.0.1");
    assert_eq!(config.server.port, 30000);
    assert_eq!(config.server.shutdown_timeout, Duration::from_secs(20));
    assert_eq!(config.server.max_body, 64 << 20);
    assert_eq!(config.cache.page_size, Amount::Auto);
    assert_eq!(config.cache.mode, CacheMode::Hierarchical);
    assert_eq!(config.engine.threads, Amount::Auto);
    assert!(config.storage.selected().is_empty());
    assert!(check_served(&config).is_ok());
}

#[test]
fn a_table_of_a_backend_that_is_not_selected_was_passed_over() {
    let warnings = |text: &str| {
        let (_file, sources) = sources(text);
        load(&sources).unwrap().warnings
    };
    let found = warnings("[storage]\nbackend = \"file\"\n[storage.filee]\ndir = \"/x\"\n");
    assert!(found.len() == 1 && found[0].starts_with("[storage.filee] has keys"), "{found:?}");
    assert!(found[0].ends_with("did you mean [storage.file]?"), "{found:?}");
    let found = warnings("[storage.file]\ndir = \"/x\"\n");
    assert!(found.len() == 1 && found[0].ends_with("storage.backend = \"file\" would start with it"), "{found:?}");
    let found = warnings("[storage]\nbackend = \"file\"\n[storage.umbp]\nx = 1\n");
    assert!(found[0].ends_with("storage.backends = [\"file\", \"umbp\"] would start with it too"), "{found:?}");
    assert!(warnings("[storage]\nbackend = \"file\"\n[storage.file]\ndir = \"/x\"\n").is_empty());
    assert!(warnings("[storage.file]\n").is_empty());
}

#[test]
fn an_unknown_key_names_the_nearest_and_its_line() {
    assert_eq!(
        errors("[engine]\n\nthread = 4\n"),
        ["kvdock.toml:3: unknown key engine.thread; did you mean engine.threads?"]
    );
    assert_eq!(errors("[servr]\nport = 1"), ["kvdock.toml:2: unknown key servr.port; did you mean server.port?"]);
    assert_eq!(
        errors("zzz = 1"),
        ["kvdock.toml:1: unknown key zzz; the sections are server, model, engine, cache, storage, telemetry"]
    );
    assert_eq!(
        errors("[storage]\nbakend = \"file\""),
        ["kvdock.toml:2: unknown key storage.bakend; did you mean storage.backend?"]
    );
}

#[test]
fn every_error_is_reported_with_value_and_what_is_allowed() {
    let found = errors("[server]\nport = 70000\nhost = 3\n[cache]\neviction = \"lur\"\n");
    assert_eq!(
        found,
        [
            "kvdock.toml:5: cache.eviction = \"lur\": takes \"lru\", \"lfu\", \"slru\", \"fifo\" or \"priority\"; did you mean \"lru\"?",
            "kvdock.toml:3: server.host = 3: takes text",
            "kvdock.toml:2: server.port = 70000: takes an integer from 0 to 65535",
        ]
    );
    assert_eq!(
        errors("[cache]\npage_size = 512"),
        ["kvdock.toml:2: cache.page_size = 512: takes \"auto\" or an integer from 1 to 256"]
    );
}

#[test]
fn broken_toml_names_the_line() {
    let found = errors("[server]\nport = \n");
    assert_eq!(found.len(), 1);
    assert!(found[0].starts_with("kvdock.toml:2: "), "{found:?}");
    assert!(errors("[server]\nport = 1\nport = 2\n")[0].starts_with("kvdock.toml:3: duplicate"));
}

#[test]
fn a_missing_file_is_named() {
    let error =
        load(&Sources { file: Some("/nonexistent/kvdock.toml".into()), ..Sources::default() }).unwrap_err().to_string();
    assert!(error.starts_with("/nonexistent/kvdock.toml: can't be read: "), "{error}");
}

#[test]
fn a_section_as_value_and_a_value_as_section_are_refused() {
    assert!(errors("server = 3")[0].contains("unknown key server"));
    assert!(errors("[server.port]\nx = 1")[0].contains("unknown key server.port.x"));
    assert_eq!(errors("[server]\n[cache]\n"), Vec::<String>::new());
}

#[test]
fn set_takes_toml_and_else_text() {
    let config = with_set(&[
        "server.port=0",
        "model.path=/models/x # y.gguf",
        "server.api_key=12345",
        "cache.device_tokens=auto",
        "storage.backends=[\"a\"]",
        "storage.file.max_bytes=10GiB",
        "storage.file.ttl=5",
        "server={shutdown_timeout = 3, port = 7}",
    ])
    .unwrap();
    assert_eq!(config.server.port, 7);
    assert_eq!(config.server.shutdown_timeout, Duration::from_secs(3));
    assert_eq!(config.model.path.unwrap().to_str(), Some("/models/x # y.gguf"));
    assert_eq!(config.server.api_key.unwrap().reveal(), "12345");
    assert_eq!(config.storage.backends, ["a"]);
    let file = &config.storage.tables["file"];
    assert_eq!(file.own["max_bytes"], "10GiB");
    assert_eq!(file.own["ttl"], 5);
}

#[test]
fn set_without_equals_or_with_an_unknown_key() {
    assert_eq!(
        with_set(&["server.port"]).unwrap_err(),
        "--set: \"server.port\" has no \"=\"; write KEY=VALUE, such as server.port=8080"
    );
    assert_eq!(with_set(&["server.prt=1"]).unwrap_err(), "--set: unknown key server.prt; did you mean server.port?");
}

#[test]
fn later_sources_win() {
    let (_file, mut sources) = sources("[server]\nport = 1\nhost = \"a\"\n[engine]\nthreads = 1\n");
    sources.env = vec![("KVDOCK_SERVER__PORT".into(), "2".into()), ("KVDOCK_ENGINE__THREADS".into(), "2".into())];
    sources.set = vec!["server.port=3".into()];
    let config = load(&sources).unwrap().config;
    assert_eq!(config.server.port, 3);
    assert_eq!(config.engine.threads, Amount::Fixed(2));
    assert_eq!(config.server.host, "a");
}

#[test]
fn environment_names_keys_and_warns_of_others() {
    let (config, warnings) = with_env(&[
        ("KVDOCK_STORAGE__BACKEND", "file"),
        ("KVDOCK_STORAGE__FILE__DIR", "/x"),
        ("KVDOCK_STORAGE__PLUGIN_PATH", "/a:/b"),
        ("KVDOCK_SERVR__PORT", "1"),
        ("KVDOCK_SOAK", "60"),
        ("KVDOCK_TEST_MODEL", "m"),
        ("PATH", "/bin"),
    ]);
    let config = config.unwrap();
    assert_eq!(config.storage.tables["file"].own["dir"], "/x");
    assert_eq!(config.storage.plugin_path.len(), 2);
    assert_eq!(
        warnings,
        ["environment variable KVDOCK_SERVR__PORT matches no config key; did you mean KVDOCK_SERVER__PORT?"]
    );
    let (config, _) = with_env(&[("KVDOCK_SERVER__PORT", "x")]);
    assert_eq!(
        config.unwrap_err(),
        "environment variable KVDOCK_SERVER__PORT: server.port = \"x\": takes an integer from 0 to 65535"
    );
}

#[test]
fn a_backend_has_host_keys_and_its_own() {
    let config = config(
        "[storage]\nbackend = \"fast\"\n[storage.fast]\nplugin = \"file\"\ntimeout = 2\n\
         dir = \"/a\"\nnested = {a = 1}\n\"odd.key\" = 2\n[storage.slow]\n",
    );
    let fast = &config.storage.tables["fast"];
    assert_eq!(fast.plugin, "file");
    assert_eq!(fast.settings.timeout, Duration::from_secs(2));
    assert_eq!(
        serde_json::Value::Object(fast.own.clone()),
        serde_json::json!({"dir": "/a", "nested": {"a": 1}, "odd.key": 2})
    );
    assert!(config.storage.tables.contains_key("slow"));
    assert_eq!(config.storage.selected(), ["fast"]);
}

#[test]
fn a_backends_host_keys_are_checked() {
    assert_eq!(
        errors("[storage.file]\nwrite_policy = \"never\"\n"),
        [
            "kvdock.toml:2: storage.file.write_policy = \"never\": takes \"write_through\", \"write_through_selective\" or \"write_back\""
        ]
    );
    assert_eq!(
        errors("[storage.file.timeout]\nx = 2\n"),
        ["kvdock.toml:2: storage.file.timeout is a table: takes a number from 0.001 to 3600"]
    );
    assert!(errors("[storage.file]\nsha256 = \"12\"")[0].contains("64 hex digits"));
    let found = errors("[storage.\"a b\"]\nx = 1");
    assert!(
        found[0].starts_with("kvdock.toml:2: the name of a backend's table") && found[0].ends_with("found \"a b\""),
        "{found:?}"
    );
    assert!(errors("[storage.file]\nx = nan")[0].contains("takes a finite number"));
}

#[test]
fn one_backend_key_or_the_other() {
    let found = errors("[storage]\nbackend = \"a\"\nbackends = [\"b\"]");
    assert!(found[0].contains("exclude each other"), "{found:?}");
    let found = errors("[storage]\nbackends = [\"a\", \"/tmp/b.so\", \"required\"]");
    assert!(found[0].contains("found \"/tmp/b.so\"") && found[1].contains("a key of [storage]"), "{found:?}");
    let found = errors("[storage]\nbackends = [\"b\", \"b\"]");
    assert!(found[0].contains("names \"b\" twice"), "{found:?}");
}

#[test]
fn a_backend_without_a_name_was_taken_for_none() {
    for text in ["[storage]\nbackend = \"\"", "[storage]\nbackends = [\"\"]"] {
        let found = errors(text);
        assert!(found.len() == 1 && found[0].contains("names a backend: a name takes 1 to 64"), "{found:?}");
    }
}

#[test]
fn names_of_any_length_were_taken() {
    let long = "x".repeat(65);
    for text in [
        format!("[storage]\nbackend = \"{long}\""),
        format!("[storage]\nbackends = [\"{long}\"]"),
        format!("[storage.{long}]\ndir = \"/x\""),
        format!("[storage.file]\nplugin = \"{long}\""),
    ] {
        let found = errors(&text);
        assert!(found.len() == 1 && found[0].starts_with("kvdock.toml:2: "), "{found:?}");
        assert!(found[0].contains("a name takes 1 to 64") && found[0].contains("(65 bytes)"), "{found:?}");
    }
}

#[test]
fn paths_in_the_home_folder_are_found() {
    let home = std::env::home_dir().unwrap();
    let config = config("[model]\npath = \"~/m.gguf\"\n[storage]\nplugin_path = [\"~/plugins\", \"/p\"]\n");
    assert_eq!(config.model.path, Some(home.join("m.gguf")));
    assert_eq!(config.storage.plugin_path, [home.join("plugins"), "/p".into()]);
    let list = with_set(&["storage.plugin_path=/p:~/plugins"]).unwrap().storage.plugin_path;
    assert_eq!(list, ["/p".into(), home.join("plugins")]);
}

#[test]
fn more_backends_than_the_cache_can_tell_apart_were_taken() {
    let listed = |count: usize| {
        let names: Vec<String> = (0..count).map(|number| format!("\"b{number}\"")).collect();
        errors(&format!("[storage]\nbackends = [{}]", names.join(", ")))
    };
    assert!(listed(64).is_empty());
    let found = listed(65);
    assert!(found.len() == 1 && found[0].contains("names 65 backends: at most 64"), "{found:?}");
}

#[test]
fn what_is_not_served_is_refused_in_words() {
    for (set, word) in
        [("engine.pp_size=2", "pipeline parallelism"), ("engine.dcp_size=2", "decode context parallelism")]
    {
        let refused = check_served(&with_set(&[set]).unwrap()).unwrap_err();
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert!(refused[0].contains(word), "{refused:?}");
    }
    let served = [
        "engine.tp_size=4",
        "engine.cp_size=4",
        "engine.device=auto",
        "engine.device=cuda",
        "storage.break_even=auto",
        "storage.backends=[\"a\", \"b\"]",
        "cache.mode=linker",
        "cache.mode=device",
    ];
    for set in served {
        assert!(check_served(&with_set(&[set]).unwrap()).is_ok(), "{set}");
    }
}

#[test]
fn what_excludes_linker_mode_is_refused_in_words() {
    for (set, word) in [
        ("cache.host_tokens=4096", "no host tier"),
        ("cache.host_layout=page_first", "page_first_direct"),
        ("cache.write_policy=write_back", "write_through_selective"),
        ("storage.break_even=auto", "side by side"),
    ] {
        let refused = check_served(&with_set(&["cache.mode=linker", set]).unwrap()).unwrap_err();
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert!(refused[0].contains(word), "{refused:?}");
    }
}

#[test]
fn secrets_are_not_printed() {
    let config = with_set(&["server.api_key=hush-hush"]).unwrap();
    assert!(!format!("{config:?}").contains("hush"));
    assert!(!with_set(&["server.api_key=hush hush"]).unwrap_err().contains("hush"));
    assert!(!errors("[server]\napi_key = 77777").join("").contains("77777"));
}

#[test]
fn the_reference_is_a_config_that_changes_nothing() {
    let text = reference();
    assert_eq!(format!("{:?}", config(&text)), format!("{:?}", config("")));
    for key in KEYS {
        let name = key.path.split('.').nth(1).unwrap();
        assert!(text.contains(&format!("{name} =")), "{}", key.path);
    }
}

proptest::proptest! {
    /// A damaged file is an error or a config, never the end of the process.
    #[test]
    fn no_text_is_too_odd(at in 0..4000_usize, with in "[\\[\\]{}\"'=.,#\n a-z0-9]{0,6}") {
        let mut text = reference();
        let at = text.char_indices().map(|(i, _)| i).nth(at).unwrap_or(0);
        text.insert_str(at, &with);
        let (_file, sources) = sources(&text);
        if let Err(errors) = load(&sources) {
            proptest::prop_assert!(!errors.0.is_empty());
        }
    }

    #[test]
    fn no_set_argument_is_too_odd(argument in ".{0,40}") {
        let _ = load(&Sources { set: vec![argument], ..Sources::default() });
    }
}
