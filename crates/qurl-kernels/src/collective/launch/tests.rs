//! Sets of variables as launchers make them, and broken ones.

use super::*;

fn launch(variables: &[(&str, &str)]) -> Result<Option<Launch>, LaunchError> {
    let find = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
    Launch::from_variables(&find)
}

fn found(variables: &[(&str, &str)]) -> Launch {
    launch(variables).expect("understood").expect("several ranks")
}

fn error(variables: &[(&str, &str)]) -> String {
    launch(variables).expect_err("an error").to_string()
}

fn at(host: &str, port: u16) -> Option<Address> {
    Some(Address { host: host.to_string(), port })
}

const TORCHRUN: [(&str, &str); 6] = [
    ("RANK", "9"),
    ("WORLD_SIZE", "16"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "8"),
    ("MASTER_ADDR", "node0"),
    ("MASTER_PORT", "29400"),
];
const OPEN_MPI: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_RANK", "3"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
];
const MPICH: [(&str, &str); 4] =
    [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
const SLURM: [(&str, &str); 5] = [
    ("SLURM_STEP_NUM_TASKS", "8"),
    ("SLURM_PROCID", "5"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_STEP_NODELIST", "gpu[07-08]"),
    ("SLURM_JOB_ID", "1234567"),
];
const KUBERNETES: [(&str, &str); 3] =
    [("JOB_COMPLETION_INDEX", "2"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "train-0.train")];

/// The set with one variable changed, or another one; an empty one is as if it were not set.
fn with<'a>(set: &[(&'a str, &'a str)], name: &'a str, value: &'a str) -> Vec<(&'a str, &'a str)> {
    let mut set: Vec<_> = set.iter().copied().filter(|(n, _)| *n != name).collect();
    set.push((name, value));
    set
}

#[test]
fn a_process_that_nobody_started_is_alone() {
    assert_eq!(launch(&[]), Ok(None));
    assert_eq!(launch(&[("SLURM_JOB_ID", "7"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), Ok(None));
    assert_eq!(launch(&[("JOB_COMPLETION_INDEX", "3")]), Ok(None));
    assert_eq!(launch(&[("WORLD_SIZE", "1")]), Ok(None));
    assert_eq!(
        launch(&[
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "1"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0")
        ]),
        Ok(None)
    );
}

#[test]
fn every_launcher_is_understood() {
    let Launch { rank, size, local_rank, local_size, address, launcher } = found(&TORCHRUN);
    assert_eq!((rank, size, local_rank, local_size), (9, 16, 1, Some(8)));
    assert_eq!((address, launcher), (at("node0", 29400), Launcher::Torchrun));
    let own_store = with(&TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE", "True");
    assert_eq!(found(&own_store).address, at("node0", 29401));
    assert_eq!(found(&with(&own_store, "QURL_PORT", "4000")).address, at("node0", 4000));

    let Launch { rank, size, local_rank, local_size, address, launcher } = found(&OPEN_MPI);
    assert_eq!((rank, size, local_rank, local_size), (3, 4, 1, Some(2)));
    assert_eq!((address, launcher), (None, Launcher::OpenMpi));

    let Launch { rank, size, local_rank, local_size, address, launcher } = found(&MPICH);
    assert_eq!((rank, size, local_rank, local_size), (1, 2, 1, Some(2)));
    assert_eq!((address, launcher), (None, Launcher::Mpich));
    let told = with(&with(&MPICH, "MASTER_ADDR", "h"), "MASTER_PORT", "5");
    assert_eq!(found(&told).address, at("h", 5));

    let Launch { rank, size, local_rank, local_size, address, launcher } = found(&SLURM);
    assert_eq!((rank, size, local_rank, local_size), (5, 8, 1, None));
    assert_eq!((address, launcher), (at("gpu07", 20_000 + 14_567), Launcher::Slurm));
    assert_eq!(found(&with(&SLURM, "MASTER_ADDR", "x")).address, at("x", 34_567));

    let Launch { rank, size, local_rank, address, launcher, .. } = found(&KUBERNETES);
    assert_eq!((rank, size, local_rank), (2, 4, 0));
    assert_eq!((address, launcher), (at("train-0.train", 29500), Launcher::Kubernetes));
    let pytorch_job =
        [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "m"), ("KUBERNETES_SERVICE_HOST", "k")];
    assert_eq!(found(&pytorch_job).local_rank, 0);
}

#[test]
fn the_innermost_launcher_counts() {
    assert_eq!(found(&[&TORCHRUN[..], &SLURM, &OPEN_MPI].concat()).launcher, Launcher::Torchrun);
    assert_eq!(found(&[&SLURM[..], &OPEN_MPI].concat()).launcher, Launcher::OpenMpi);
    assert_eq!(
        found(&[&SLURM[..], &with(&KUBERNETES, "WORLD_SIZE", "8")].concat()).launcher,
        Launcher::Slurm
    );
}

#[test]
fn what_is_missing_is_named() {
    let missing = |set: &[(&str, &str)], name: &str| {
        let error = error(&with(set, name, ""));
        assert!(error.starts_with(&format!("{name} is not set, but ")), "{error}");
    };
    for name in ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"] {
        missing(&TORCHRUN, name);
    }
    missing(&OPEN_MPI, "OMPI_COMM_WORLD_SIZE");
    missing(&OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK");
    missing(&MPICH, "PMI_SIZE");
    missing(&MPICH, "MPI_LOCALRANKID");
    missing(&SLURM, "SLURM_PROCID");
    missing(&SLURM, "SLURM_LOCALID");
    missing(&KUBERNETES, "MASTER_ADDR");
    let text = error(&with(&SLURM, "SLURM_STEP_NODELIST", ""));
    assert!(text.starts_with("MASTER_ADDR is not set, but SLURM_STEP_NUM_TASKS=8 is"), "{text}");
    let text = error(&[("WORLD_SIZE", "4"), ("MASTER_ADDR", "m")]);
    assert!(text.starts_with("RANK is not set, but WORLD_SIZE=4 is"), "{text}");
}

#[test]
fn what_is_wrong_is_named() {
    assert_eq!(error(&with(&TORCHRUN, "RANK", "16")), "RANK=\"16\": expected a number below WORLD_SIZE=16");
    assert_eq!(
        error(&with(&TORCHRUN, "LOCAL_RANK", "8")),
        "LOCAL_RANK=\"8\": expected a number below LOCAL_WORLD_SIZE=8"
    );
    assert_eq!(
        error(&with(&OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "x")),
        "OMPI_COMM_WORLD_SIZE=\"x\": expected a number"
    );
    assert_eq!(error(&with(&MPICH, "PMI_RANK", "-1")), "PMI_RANK=\"-1\": expected a number");
    assert_eq!(
        error(&with(&TORCHRUN, "MASTER_PORT", "0")),
        "MASTER_PORT=\"0\": expected a number of a port, 1 to 65535"
    );
    let both = [&with(&with(&TORCHRUN, "RANK", "1"), "WORLD_SIZE", "4")[..], &OPEN_MPI].concat();
    assert_eq!(
        error(&both),
        "the launchers do not agree: rank 1 of 4 by torchrun and rank 3 of 4 by mpirun of Open MPI"
    );
}

#[test]
fn the_first_machine_of_a_list_is_found() {
    let first = [
        ("gpu7", Some("gpu7")),
        ("gpu7,gpu9", Some("gpu7")),
        ("gpu[07-09,12]", Some("gpu07")),
        ("gpu[3,5]", Some("gpu3")),
        ("rack1-gpu[003]-ib,other", Some("rack1-gpu003-ib")),
        ("", None),
        ("gpu[", None),
        ("gpu[]", None),
        ("r[1-2]n[3-4]", None),
    ];
    for (list, host) in first {
        assert_eq!(first_host(list).as_deref(), host, "{list}");
    }
}

#[test]
fn a_rank_takes_the_gpu_of_its_local_rank() {
    let gpu = |local_rank: usize, gpus: usize, set: &[&str]| {
        let launch = Launch { local_rank, ..found(&TORCHRUN) };
        launch.gpu_by(gpus, &|name| set.contains(&name).then(|| "1".to_string())).ok()
    };
    assert_eq!((gpu(1, 4, &[]), gpu(0, 1, &["CUDA_VISIBLE_DEVICES"])), (Some(1), Some(0)));
    assert_eq!((gpu(4, 4, &[]), gpu(0, 0, &["NCCL_HOSTID"])), (None, None));
    assert_eq!((gpu(5, 4, &["NCCL_HOSTID"]), gpu(3, 1, &["NCCL_HOSTID"])), (Some(1), Some(0)));
    assert_eq!((gpu(3, 1, &["CUDA_VISIBLE_DEVICES"]), gpu(3, 2, &["CUDA_VISIBLE_DEVICES"])), (Some(0), None));
}
