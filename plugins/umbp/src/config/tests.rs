use std::path::PathBuf;

use kvdock_plugin_api::mock::identity;

use super::*;

fn parse_in(json: &str, environment: &[(&str, &str)]) -> Result<Config> {
    let variable = |name: &str| {
        let found = environment.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        found.or_else(|| (name == "HOME").then(|| "/home/me".to_owned()))
    };
    Config::parse("umbp", &environment::complete(serde_json::from_str(json).unwrap(), &variable), &variable, 0)
}

fn parse(json: &str) -> Result<Config> {
    parse_in(json, &[])
}

#[test]
fn nothing_is_needed() {
    let config = parse("{}").unwrap();
    assert_eq!((config.dram.capacity, config.dram.page), (4 << 30, 65536));
    let ssd = config.ssd.unwrap();
    assert_eq!(ssd.dirs, [PathBuf::from("/home/me/.cache/kvdock/umbp")]);
    assert!(ssd.strict && ssd.verify && ssd.direct);
}

#[test]
fn the_environment_completes_and_the_configuration_counts() {
    let environment = [
        ("UMBP_DRAM_CAPACITY", "1048576"),
        ("UMBP_SSD_DIR", "/a,/b"),
        ("UMBP_ROLE", "LEADER"),
        ("UMBP_SSD_DURABILITY", "relaxed"),
        ("UMBP_DRAM_HIGH_WM", "0.8"),
    ];
    let config = parse_in(r#"{"ssd_durability_mode":"strict"}"#, &environment).unwrap();
    assert_eq!((config.dram.capacity, config.dram.high, config.role), (1 << 20, 0.8, Role::Leader));
    let ssd = config.ssd.unwrap();
    assert_eq!(ssd.dirs, [PathBuf::from("/a"), PathBuf::from("/b")]);
    assert!(ssd.strict);
}

#[test]
fn a_small_pool_gets_small_pages() {
    assert_eq!(parse(r#"{"dram_capacity_bytes":131072}"#).unwrap().dram.page, 16384);
    assert_eq!(parse(r#"{"dram_capacity_bytes":100000}"#).unwrap().dram.page, 8192);
    assert_eq!(parse(r#"{"dram_capacity_bytes":"8MiB"}"#).unwrap().dram.page, 65536);
}

#[test]
fn h02_a_disk_that_is_not_served_is_no_default() {
    assert!(parse("{}").unwrap().ssd.is_some());
    assert!(parse(r#"{"ssd_enabled":false}"#).unwrap().ssd.is_none());
}

#[test]
fn every_setting_of_the_reference_is_read_or_refused_with_a_reason() {
    let config = parse(
        r#"{"dram_numa_node":3,"dram_numa_nodes":[1,3],"dram_numa_strict":true,"dram_prefault":true,"dram_prefault_threads":2,
            "dram_write_threads":2,"dram_read_threads":3,"dram_copy_threads_min_bytes":"1MiB","dram_nt_copy_min_bytes":65536,
            "ssd_shard_io_threads":2,"ssd_single_flight_reads":false,"ssd_layout_mode":"segmented_log","ssd_enable_background_gc":true,
            "dram_use_shared_memory":false,"dram_shm_name":"","backend_policy_path":"","kv_events_subscriber":false,"kv_events_topic":"",
            "disable_zero_copy_register":false,"spdk_proxy_bin":""}"#,
    )
    .unwrap();
    assert_eq!(config.dram.numa_nodes, [1, 3]);
    assert!(config.dram.numa_strict && config.dram.prefault_threads == 2);
    let copies = Copies { write_threads: 2, read_threads: 3, worth: 1 << 20, past_caches: Some(65536) };
    assert_eq!(config.dram.copies, copies);
    let ssd = config.ssd.unwrap();
    assert_eq!((ssd.shard_threads, ssd.single_flight), (2, false));
    assert_eq!(parse(r#"{"follower_mode":true}"#).unwrap().role, Role::Follower);
    assert_eq!(parse(r#"{"force_ssd_copy_on_write":true,"follower_mode":false}"#).unwrap().role, Role::Leader);
    assert_eq!(parse(r#"{"force_ssd_copy_on_write":true,"role":"leader"}"#).unwrap().role, Role::Leader);

    let environment = [
        ("UMBP_DRAM_COPY_THREADS", "2"),
        ("UMBP_DRAM_READ_THREADS", "3"),
        ("UMBP_DRAM_NT_COPY", "0"),
        ("UMBP_DRAM_NUMA_STRICT", "1"),
        ("UMBP_SSD_SHARD_IO_THREADS", "5"),
        ("UMBP_SSD_SINGLE_FLIGHT", "false"),
        ("UMBP_STANDALONE_ADDRESS", "unix:///tmp/x.grpc.sock"),
        ("UMBP_KEY_HANDLE_SLOTS", "0"),
        ("UMBP_GRPC_MAX_MESSAGE_BYTES", "1048576"),
    ];
    let config = parse_in("{}", &environment).unwrap();
    let copies = config.dram.copies;
    assert_eq!((copies.write_threads, copies.read_threads, copies.past_caches), (2, 3, None));
    let server = config.standalone.unwrap();
    assert_eq!((server.key_handles, server.message), (0, 1 << 20));
    for (name, value, key) in [
        ("UMBP_SPDK_NVME_PCI", "0000:01:00.0", "ssd_backend"),
        ("UMBP_BACKEND_POLICY", "/x.json", "backend_policy_path"),
        ("UMBP_DISABLE_ZERO_COPY_REGISTER", "1", "disable_zero_copy_register"),
    ] {
        let error = parse_in("{}", &[(name, value)]).unwrap_err();
        assert!(error.message.contains(&format!("storage.umbp.{key}:")), "{name}: {}", error.message);
    }
    assert!(parse_in(r#"{"ssd_backend":"file"}"#, &[("UMBP_SPDK_NVME_PCI", "0000:01:00.0")]).is_ok());
}

#[test]
fn bad_values_are_errors_that_name_the_key() {
    for (json, key) in [
        (r#"{"dram_capacity_bytes":"much"}"#, "dram_capacity_bytes"),
        (r#"{"dram_page_size":5000}"#, "dram_page_size"),
        (r#"{"dram_high_watermark":1.5}"#, "dram_high_watermark"),
        (r#"{"dram_low_watermark":0.95}"#, "dram_low_watermark"),
        (r#"{"ssd_low_watermark":0.9}"#, "ssd_low_watermark"),
        (r#"{"ssd_storage_dir":""}"#, "ssd_storage_dir"),
        (r#"{"ssd_backend":"spdk"}"#, "ssd_backend"),
        (r#"{"role":"follower","ssd_enabled":false}"#, "role"),
        (r#"{"role":"boss"}"#, "role"),
        (r#"{"standalone_address":"10.0.0.1:5"}"#, "standalone_address"),
        (r#"{"standalone_auto_start":true}"#, "standalone_auto_start"),
        (r#"{"master_address":"10.0.0.1"}"#, "master_address"),
        (r#"{"master_address":"http://10.0.0.1:5"}"#, "master_address"),
        (r#"{"master_address":"10.0.0.1:5","standalone_address":"unix:///tmp/x"}"#, "master_address"),
        (r#"{"master_address":"10.0.0.1:5","role":"leader"}"#, "role"),
        (r#"{"master_address":"10.0.0.1:5","ssd_capacity_bytes":"much"}"#, "ssd_capacity_bytes"),
        (r#"{"master_address":"10.0.0.1:5","eviction_policy":"prefix_aware_lru"}"#, "eviction_policy"),
        (r#"{"master_address":"10.0.0.1:5","auto_heartbeat":false}"#, "auto_heartbeat"),
        (r#"{"master_address":"10.0.0.1:5","peer_service_port":70000}"#, "peer_service_port"),
        (r#"{"master_address":"10.0.0.1:5","peer_service_port":[]}"#, "peer_service_port"),
        (r#"{"master_address":"10.0.0.1:5","data_plane":"udp"}"#, "data_plane"),
        (r#"{"ssd_copy_worker_threads":0}"#, "ssd_copy_worker_threads"),
        (r#"{"extra_backend_tag":"a b"}"#, "extra_backend_tag"),
        (r#"{"drams":1}"#, "drams"),
        (r#"{"dram_numa_nodes":"0,x"}"#, "dram_numa_nodes"),
        (r#"{"dram_numa_nodes":[1024]}"#, "dram_numa_nodes"),
        (r#"{"dram_write_threads":0}"#, "dram_write_threads"),
        (r#"{"ssd_segment_size_bytes":"65GiB"}"#, "ssd_segment_size_bytes"),
        (r#"{"follower_mode":true,"force_ssd_copy_on_write":true}"#, "force_ssd_copy_on_write"),
        (r#"{"follower_mode":true,"role":"leader"}"#, "role"),
        (r#"{"grpc_max_message_bytes":1}"#, "grpc_max_message_bytes"),
        (r#"{"dram_use_shared_memory":true}"#, "dram_use_shared_memory"),
        (r#"{"dram_shm_name":"/umbp_dram"}"#, "dram_shm_name"),
        (r#"{"page_size":4096}"#, "page_size"),
        (r#"{"backend_policy_path":"/x.json"}"#, "backend_policy_path"),
        (r#"{"ssd_layout_mode":"tree"}"#, "ssd_layout_mode"),
        (r#"{"ssd_enable_background_gc":false}"#, "ssd_enable_background_gc"),
        (r#"{"kv_events_subscriber":true}"#, "kv_events_subscriber"),
        (r#"{"kv_events_endpoint":"tcp://localhost:5557"}"#, "kv_events_endpoint"),
        (r#"{"disable_zero_copy_register":true}"#, "disable_zero_copy_register"),
        (r#"{"spdk_nvme_pci_addr":"0000:01:00.0"}"#, "spdk_nvme_pci_addr"),
        (r#"{"spdk_proxy_tenant_id":0}"#, "spdk_proxy_tenant_id"),
    ] {
        let error = parse(json).unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidConfig);
        assert!(error.message.contains(&format!("storage.umbp.{key}:")), "{json}: {}", error.message);
    }
}

#[test]
fn the_schema_agrees_with_the_reader() {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    for (json, good) in [
        (r#"{"dram_capacity_bytes":"4GiB","dram_page_size":65536,"ssd_storage_dir":"/x,/y","role":"leader"}"#, true),
        (r#"{"eviction_policy":"prefix_aware_lru","eviction_candidate_window":4,"auto_promote_on_read":false}"#, true),
        (r#"{"standalone_address":"unix:///tmp/x.grpc.sock","node_id":"a","node_tags":["a=b"]}"#, true),
        (
            r#"{"dram_numa_nodes":[0,1],"dram_nt_copy":false,"ssd_shard_io_threads":0,"ssd_single_flight_reads":true}"#,
            true,
        ),
        (r#"{"key_handle_slots":0,"grpc_max_message_bytes":"16MiB","ssd_layout_mode":"segmented_log"}"#, true),
        (r#"{"master_address":"10.0.0.1:5","peer_service_port":[7,8],"io_engine_host":"a","io_engine_port":9}"#, true),
        (r#"{"master_address":"m:5","data_plane":"tcp","staging_buffer_size":"64MiB","rdma_devices":"mlx5_0"}"#, true),
        (r#"{"master_address":"m:5","dram_read_lease_ms":0}"#, false),
        (r#"{"ssd_copy_worker_threads":0}"#, false),
        (r#"{"ssd_layout_mode":"tree"}"#, false),
        (r#"{"dram_high_watermark":0}"#, false),
        (r#"{"eviction_policy":"random"}"#, false),
        (r#"{"other":1}"#, false),
        (r#"{"master_address":"m:65535","standalone_address":""}"#, true),
        (r#"{"master_address":""}"#, true),
        (r#"{"master_address":"[::1]:50051","role":"standalone","eviction_policy":"lru"}"#, true),
        (r#"{"master_address":"nonsense"}"#, false),
        (r#"{"master_address":"m:99999"}"#, false),
        (r#"{"master_address":"m:65536"}"#, false),
        (r#"{"master_address":"m:0"}"#, false),
        (r#"{"master_address":"http://m:5"}"#, false),
        (r#"{"master_address":"m:5","standalone_address":"unix:///tmp/x"}"#, false),
        (r#"{"master_address":"m:5","role":"leader"}"#, false),
        (r#"{"master_address":"m:5","eviction_policy":"prefix_aware_lru"}"#, false),
        (r#"{"standalone_address":"unix:/tmp/x"}"#, true),
        (r#"{"standalone_address":"/tmp/x"}"#, true),
        (r#"{"standalone_address":"tcp://x"}"#, false),
        (r#"{"ssd_storage_dir":","}"#, false),
        (r#"{"ssd_storage_dir":" , "}"#, false),
        (r#"{"ssd_storage_dir":"/a,"}"#, true),
        (r#"{"role":"leader","ssd_enabled":false}"#, false),
        (r#"{"role":"follower","ssd_enabled":false}"#, false),
        (r#"{"role":"standalone","ssd_enabled":false}"#, true),
        (r#"{"ssd_enabled":false}"#, true),
    ] {
        assert_eq!(parse(json).is_ok(), good, "{json}");
        assert_eq!(validator.is_valid(&serde_json::from_str(json).unwrap()), good, "{json}");
    }
    assert!(validator.is_valid(&serde_json::from_str(CHECK_CONFIG).unwrap()));
}

#[test]
fn a_master_makes_a_node_and_the_environment_does_not_mix_the_modes() {
    let environment = [
        ("UMBP_STANDALONE_ADDRESS", "unix:///tmp/x"),
        ("UMBP_ROLE", "leader"),
        ("UMBP_SSD_DIR", "/a"),
        ("UMBP_NODE_ID", "n1"),
        ("UMBP_PEER_SERVICE_PORT", "7000"),
        ("UMBP_DRAM_READ_LEASE_MS", "9"),
    ];
    let config = parse_in(r#"{"master_address":"10.0.0.1:5","node_tags":"a=b,c=d"}"#, &environment).unwrap();
    assert!(config.standalone.is_none() && config.ssd.is_none());
    let cluster = config.distributed.unwrap();
    assert_eq!((cluster.master.as_str(), cluster.node_id.as_str(), cluster.peer_port), ("10.0.0.1:5", "n1", 7000));
    assert_eq!((cluster.tags, cluster.lease), (vec!["a=b".to_owned(), "c=d".to_owned()], Duration::from_millis(9)));
    // A server that the configuration names counts before a master of the environment; and one of the environment too.
    let environment = [("UMBP_MASTER_ADDRESS", "m:5"), ("UMBP_STANDALONE_ADDRESS", "unix:///tmp/x")];
    for json in ["{}", r#"{"standalone_address":"unix:///tmp/y"}"#] {
        let config = parse_in(json, &environment).unwrap();
        assert!(config.standalone.is_some() && config.distributed.is_none());
    }
    // It has segments where somebody asks for them; those of others are not taken for its own.
    let dir = ("UMBP_SSD_DIR", "/a");
    let config = parse_in("{}", &[("UMBP_MASTER_ADDRESS", "m:5"), dir]).unwrap();
    assert!(config.distributed.is_some() && config.ssd.is_none());
    let config = parse_in("{}", &[("UMBP_MASTER_ADDRESS", "m:5"), dir, ("UMBP_SSD_ENABLED", "1")]).unwrap();
    assert_eq!(config.ssd.unwrap().dirs, [PathBuf::from("/a")]);
    for (json, has) in [
        (r#"{"master_address":"m:5"}"#, false),
        (r#"{"master_address":"m:5","ssd_staging_buffer_slots":4}"#, false),
        (r#"{"master_address":"m:5","ssd_enabled":true}"#, true),
        (r#"{"master_address":"m:5","ssd_capacity_bytes":"1GiB"}"#, true),
        (r#"{"master_address":"m:5","ssd_capacity_bytes":"1GiB","ssd_enabled":false}"#, false),
    ] {
        assert_eq!(parse_in(json, &[dir]).unwrap().ssd.is_some(), has, "{json}");
    }
    // An empty address is none.
    let config = parse_in(r#"{"master_address":""}"#, &[("UMBP_MASTER_ADDRESS", "m:5")]).unwrap();
    assert!(config.distributed.is_none() && config.ssd.is_some());
}

#[test]
fn ports_grow_with_the_rank_or_are_listed() {
    let port = |json: &str, rank| {
        let map = serde_json::from_str(json).unwrap();
        Config::parse("umbp", &map, &|_| None, rank).map(|config| config.distributed.unwrap().peer_port)
    };
    assert_eq!(port(r#"{"master_address":"m:5","peer_service_port":7000}"#, 3).unwrap(), 7003);
    assert_eq!(port(r#"{"master_address":"m:5","peer_service_port":"7000, 8000"}"#, 1).unwrap(), 8000);
    assert_eq!(port(r#"{"master_address":"m:5"}"#, 3).unwrap(), 0);
    let error = port(r#"{"master_address":"m:5","peer_service_port":[7000]}"#, 1).unwrap_err();
    assert!(error.message.contains("peer_service_port") && error.message.contains("rank 1"), "{}", error.message);
}

fn of_rank(json: &str, tp: (u32, u32), replicated: bool) -> Config {
    of_identity(json, &Identity { tp, replicated, ..identity("model") })
}

fn of_identity(json: &str, who: &Identity) -> Config {
    let mut config = parse(json).unwrap();
    config.place(who);
    config.tell_apart("near", who);
    config
}

/// They hold the same bytes, and the ranks with the first part of the tokens store them.
#[test]
fn context_parallel_ranks_share_a_store_and_are_nodes_of_their_own() {
    let of = |json, cp, tp| of_identity(json, &Identity { cp: (cp, 2), tp: (tp, 2), ..identity("model") });
    let dir = |json, cp, tp| of(json, cp, tp).ssd.unwrap().dirs[0].display().to_string();
    let local = r#"{"ssd_storage_dir":"/a"}"#;
    assert_eq!([dir(local, 0, 1), dir(local, 1, 1)], ["/a/tp1", "/a/tp1"]);
    let memory = |cp, tp| of(r#"{"ssd_enabled":false}"#, cp, tp).shared;
    assert!(memory(0, 1).is_some() && memory(0, 1) == memory(1, 1) && memory(0, 0) != memory(0, 1));
    let cluster = r#"{"ssd_storage_dir":"/a","master_address":"m:5","node_id":"one"}"#;
    assert_eq!([dir(cluster, 0, 1), dir(cluster, 1, 1)], ["/a/cp0_tp1", "/a/cp1_tp1"]);
    let node = |cp| of(cluster, cp, 1).distributed.unwrap().node_id;
    assert_eq!([node(0), node(1)], ["one:dp0:pp0:tp1:cp0", "one:dp0:pp0:tp1:cp1"]);
    let number = |cp, tp| distributed::rank(&Identity { cp: (cp, 2), tp: (tp, 2), ..identity("model") }, &|_| None);
    assert_eq!([number(0, 0), number(0, 1), number(1, 0), number(1, 1)], [0, 1, 2, 3]);
}

#[test]
fn ranks_of_one_server_have_names_and_directories_of_their_own_and_share_what_is_the_same_on_all() {
    let dir = |json, tp, replicated| of_rank(json, tp, replicated).ssd.unwrap().dirs[0].display().to_string();
    let local = r#"{"ssd_storage_dir":"/a"}"#;
    assert_eq!((dir(local, (0, 1), false), dir(local, (1, 2), false)), ("/a".to_owned(), "/a/tp1".to_owned()));
    // One of them writes it, so all have to look there.
    assert_eq!(dir(local, (1, 2), true), "/a");
    let cluster = r#"{"ssd_storage_dir":"/a","master_address":"m:5","node_id":"one"}"#;
    assert_eq!(dir(cluster, (1, 2), true), "/a/tp1", "each of its ranks is a node");
    let node = |tp| of_rank(cluster, tp, true).distributed.unwrap().node_id;
    assert_eq!((node((0, 1)), node((1, 2))), ("one".to_owned(), "one:dp0:pp0:tp1".to_owned()));
    let server = r#"{"standalone_address":"unix:///s","node_id":"one"}"#;
    assert_eq!(of_rank(server, (1, 4), false).standalone.unwrap().node_id, "one:dp0:pp0:tp1");
    let server = r#"{"standalone_address":"unix:///s"}"#;
    assert_eq!(of_rank(server, (1, 4), false).standalone.unwrap().node_id, "", "it reports to nobody");
    let memory = |tp, replicated| of_rank(r#"{"ssd_enabled":false}"#, tp, replicated).shared;
    assert!(memory((0, 2), true).is_some() && memory((0, 2), true) == memory((1, 2), true));
    assert_eq!((memory((1, 2), false), memory((0, 1), true)), (None, None));
}

#[test]
fn a_number_that_a_launcher_gave_a_process_is_not_that_of_its_ranks() {
    let launched = |name: &str| (name == "LOCAL_RANK").then(|| "3".to_owned());
    assert_eq!(distributed::rank(&identity("model"), &launched), 3);
    assert_eq!(distributed::rank(&Identity { tp: (1, 2), ..identity("model") }, &launched), 1);
}
