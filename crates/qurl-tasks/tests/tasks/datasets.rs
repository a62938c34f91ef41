//! Data sets: the three file formats give the same rows, errors name file, row and key, and shared sets load
//! whole.

use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use qurl_tasks::data::{DataError, Row, read};
use qurl_tasks::grader::Policy;
use qurl_tasks::presets::{DAPO, DEEPSCALER, GSM8K, PLAIN};
use qurl_tasks::tasks::DatasetTask;
use qurl_tasks::tasks::overlap::without_overlap;
use qurl_tasks::{Prompt, Split, Task};

/// A file that is removed at the end of its test.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str, content: &[u8]) -> Scratch {
        let path = std::env::temp_dir().join(format!("qurl-{}-{name}", std::process::id()));
        std::fs::write(&path, content).unwrap();
        Scratch(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).ok();
    }
}

const LINES: &str = concat!(
    "{\"id\": \"a\", \"problem\": \"2+2?\", \"answer\": \"4\", \"source\": \"s\", \"level\": 1}\n",
    "\n",
    "{\"question\": \"3+3?\", \"answer\": \"work\\n#### 6\"}\n",
    "{\"prompt\": [{\"role\": \"user\", \"content\": \"4+4?\"}], \"reward_model\": \
     {\"ground_truth\": \"8\", \"style\": \"rule\"}, \"data_source\": \"verl\"}\n",
    "{\"problem\": \"5+5?\", \"solution\": \"so $\\\\boxed{10}$\"}\n",
    "{\"problem\": \"1,2?\", \"answer\": [\"1\", 2]}\n",
);

#[test]
fn what_is_wrong_with_a_file_of_lines_is_named() {
    let message = |file: &Scratch| read(file.path()).expect_err("refused").to_string();
    for (name, content) in
        [("no.jsonl.gz", LINES.as_bytes()), ("short.jsonl.gz", b"{}"), ("empty.jsonl.gz", b"")]
    {
        let text = message(&Scratch::new(name, content));
        assert!(text.contains(name) && text.contains("not a gzip file"), "{text}");
    }
    let text = message(&Scratch::new(
        "text.jsonl",
        b"{\"problem\":\"1\",\"answer\":\"1\"}\n\n{\"problem\":\"\xff\"}\n",
    ));
    assert!(text.contains("text.jsonl, line 3: not UTF-8"), "{text}");
    let marked = Scratch::new("marked.jsonl", format!("\u{feff}{LINES}").as_bytes());
    let plain = Scratch::new("unmarked.jsonl", LINES.as_bytes());
    let answers =
        |file: &Scratch| read(file.path()).unwrap().into_iter().map(|row| row.answer).collect::<Vec<_>>();
    assert_eq!(answers(&marked), answers(&plain));
}

#[test]
fn json_lines_with_all_aliases() {
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(LINES.as_bytes()).unwrap();
    let plain = Scratch::new("aliases.jsonl", LINES.as_bytes());
    let packed = Scratch::new("aliases.jsonl.gz", &gz.finish().unwrap());
    let rows = read(plain.path()).unwrap();
    let answers: Vec<&str> = rows.iter().map(|r| r.answer.as_str()).collect();
    assert_eq!(answers, ["4", "work\n#### 6", "8", "10", "1, 2"]);
    assert_eq!(rows[0].id, "a");
    assert_eq!(rows[0].extra["level"], 1);
    assert!(rows[1].id.ends_with(":3"), "{}", rows[1].id);
    assert!(matches!(&rows[2].problem, Prompt::Chat(m) if m[0].role == "user"));
    assert_eq!(rows[2].source.as_deref(), Some("verl"));
    let again = read(packed.path()).unwrap();
    assert_eq!(
        again.iter().map(|r| &r.answer).collect::<Vec<_>>(),
        rows.iter().map(|r| &r.answer).collect::<Vec<_>>()
    );

    let task = DatasetTask::new("mixed", rows, GSM8K, Policy::Equivalence, 0.0);
    let rewards: Vec<f64> = (0..5)
        .map(|i| {
            let problem = task.draw(Split::Train, 1, i).unwrap();
            let right = ["4", "6", "8", "10", "2, 1"]
                .iter()
                .any(|a| task.verify(&problem, &format!("#### {a}")).reward == 1.0);
            f64::from(u8::from(right))
        })
        .collect();
    assert_eq!(rewards, [1.0; 5]);
    assert_eq!((task.len(Split::Train), task.len(Split::Test)), (Some(5), Some(0)));
    assert_eq!(task.draw(Split::Test, 1, 0), None);
}

#[test]
fn errors_name_file_row_and_key() {
    let check = |name: &str, content: &str, parts: &[&str]| {
        let file = Scratch::new(name, content.as_bytes());
        let error = read(file.path()).unwrap_err().to_string();
        assert!(parts.iter().all(|p| error.contains(p)) && error.contains(name), "{error}");
    };
    let good = "{\"problem\": \"p\", \"answer\": \"1\"}\n";
    check("bad.jsonl", &format!("{good}nonsense\n"), &["line 2"]);
    check("noanswer.jsonl", "{\"problem\": \"p\"}\n", &["line 1", "`answer`"]);
    check("noproblem.jsonl", &format!("{good}{good}{{\"answer\": 3}}\n"), &["line 3", "`problem`", "answer"]);
    check("emptyanswer.jsonl", "{\"problem\": \"p\", \"answer\": \"\"}\n", &["line 1"]);
    check("empty.jsonl", "", &["no rows"]);
    check("bad.parquet", "not parquet at all", &["parquet"]);
    assert!(matches!(read(Path::new("no/such/file.jsonl")), Err(DataError::Io { .. })));
}

/// Writes verl's layout: a list of messages, a nested ground truth, a data source, an index.
fn write_verl_parquet(rows: &[(&str, &str)]) -> Vec<u8> {
    let schema = "message schema {
        OPTIONAL BYTE_ARRAY data_source (UTF8);
        OPTIONAL GROUP prompt (LIST) { REPEATED GROUP list { OPTIONAL GROUP element {
            OPTIONAL BYTE_ARRAY content (UTF8);
            OPTIONAL BYTE_ARRAY role (UTF8);
        } } }
        OPTIONAL GROUP reward_model {
            OPTIONAL BYTE_ARRAY ground_truth (UTF8);
            OPTIONAL BYTE_ARRAY style (UTF8);
        }
        OPTIONAL INT64 index;
    }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(Compression::SNAPPY).build());
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, schema, properties).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let n = rows.len();
    let texts =
        |f: &dyn Fn(usize) -> String| (0..n).map(|i| ByteArray::from(f(i).as_str())).collect::<Vec<_>>();
    // Two messages a row: a system message and the problem.
    let messages = |f: &dyn Fn(usize, bool) -> String| {
        let all = (0..n).flat_map(|i| [f(i, true), f(i, false)]);
        all.map(|text| ByteArray::from(text.as_str())).collect::<Vec<_>>()
    };
    let columns: Vec<(Vec<ByteArray>, i16, bool)> = vec![
        (texts(&|_| "math".into()), 1, false),
        (messages(&|i, system| if system { "Be brief.".into() } else { rows[i].0.into() }), 4, true),
        (messages(&|_, system| if system { "system".into() } else { "user".into() }), 4, true),
        (texts(&|i| rows[i].1.into()), 2, false),
        (texts(&|_| "rule".into()), 2, false),
    ];
    for (values, level, repeated) in columns {
        let mut column = group.next_column().unwrap().unwrap();
        let definition = vec![level; values.len()];
        let repetition: Vec<i16> = (0..values.len()).map(|i| (i % 2) as i16).collect();
        let repetition = repeated.then_some(&repetition[..]);
        column.typed::<ByteArrayType>().write_batch(&values, Some(&definition), repetition).unwrap();
        column.close().unwrap();
    }
    let mut column = group.next_column().unwrap().unwrap();
    let numbers: Vec<i64> = (0..n as i64).collect();
    column.typed::<Int64Type>().write_batch(&numbers, Some(&vec![1; n]), None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    bytes
}

#[test]
fn verl_parquet() {
    let file = Scratch::new(
        "verl.parquet",
        &write_verl_parquet(&[("2+2?", "4"), ("Half?", "\\frac{1}{2}"), ("3+4?", "7")]),
    );
    let rows = read(file.path()).unwrap();
    assert_eq!(rows.len(), 3);
    assert_eq!(rows[1].answer, "\\frac{1}{2}");
    assert_eq!(rows[1].source.as_deref(), Some("math"));
    assert_eq!(rows[2].extra["index"], 2);
    let Prompt::Chat(messages) = &rows[0].problem else { panic!("expected messages") };
    assert_eq!((messages[0].role.as_str(), messages[1].content.as_str()), ("system", "2+2?"));
    let task = DatasetTask::new("verl", rows, DAPO, Policy::AnswerLine, 0.0);
    for index in 0..3 {
        let problem = task.draw(Split::Train, 5, index).unwrap();
        assert_eq!(task.verify(&problem, &format!("Answer: {}", problem.answer)).reward, 1.0);
        assert_eq!(task.verify(&problem, "Answer: 12345").reward, 0.0);
        assert_eq!(problem.extra["data_source"], "math");
    }
}

#[test]
fn splits_of_a_data_set_share_no_problem() {
    // Every problem occurs twice with other spacing: both copies must land on the same side.
    let lines: String = (0..400)
        .map(|i| {
            format!(
                "{{\"problem\": \"What is{}{} + 1?\", \"answer\": \"{}\"}}\n",
                " ".repeat(1 + i % 2),
                i / 2,
                i / 2 + 1
            )
        })
        .collect();
    let file = Scratch::new("copies.jsonl", lines.as_bytes());
    let task = DatasetTask::new("copies", read(file.path()).unwrap(), PLAIN, Policy::Equivalence, 0.2);
    let answers = |split| {
        let count = task.len(split).unwrap();
        (0..count).map(|i| task.draw(split, 3, i).unwrap().answer).collect::<HashSet<_>>()
    };
    let (train, test) = (answers(Split::Train), answers(Split::Test));
    assert!(train.is_disjoint(&test));
    assert_eq!(train.len() + test.len(), 200);
    assert!((20..=60).contains(&test.len()), "{}", test.len());
    // An epoch has every row once; the next one has another order.
    let count = task.len(Split::Train).unwrap();
    let epoch = |e: u64| {
        (0..count).map(|i| task.draw(Split::Train, 3, e * count + i).unwrap().id).collect::<Vec<_>>()
    };
    let (first, second) = (epoch(0), epoch(1));
    assert_eq!(first.iter().collect::<HashSet<_>>().len(), count as usize);
    assert_ne!(first, second);
}

#[test]
fn shared_sets_load_and_their_answers_verify() {
    let Some(data) = crate::common::shared_data() else { return };
    let sets = [
        ("gsm8k/test.jsonl", 1319),
        ("dapo17k/train.jsonl.gz", 17917),
        ("deepscaler/train_aime.jsonl", 975),
        ("math500/test.jsonl", 500),
        ("minerva/test.jsonl", 272),
        ("olympiad_bench/test.jsonl", 675),
    ];
    for (set, count) in sets {
        let rows = read(&data.join(set)).unwrap();
        assert_eq!(rows.len(), count, "{set}");
        let task = DatasetTask::new(set, rows, DEEPSCALER, Policy::StrictBox, 0.0);
        for index in 0..200 {
            let problem = task.draw(Split::Train, 1, index).unwrap();
            let right = format!("I think it is \\boxed{{{}}}.", problem.answer);
            assert_eq!(task.verify(&problem, &right).reward, 1.0, "{set}: {}", problem.answer);
            if problem.answer.contains("where") {
                // What follows "where" is not compared.
                continue;
            }
            let wrong = format!("I think it is \\boxed{{{} + 1 + q}}.", problem.answer);
            assert_eq!(task.verify(&problem, &wrong).reward, 0.0, "{set}: {}", problem.answer);
        }
    }
    // GSM8K's own solutions end in `####`.
    let task = DatasetTask::new(
        "gsm8k",
        read(&data.join("gsm8k/train.jsonl.gz")).unwrap(),
        GSM8K,
        Policy::Equivalence,
        0.0,
    );
    for index in 0..7473 {
        let problem = task.draw(Split::Train, 1, index).unwrap();
        let solution = task.worked_solution(&problem).unwrap();
        assert_eq!(task.verify(&problem, &solution).reward, 1.0, "{solution}");
    }
    // Countdown rows bring their numbers.
    let task = DatasetTask::new(
        "countdown",
        read(&data.join("countdown/test.jsonl")).unwrap(),
        PLAIN,
        Policy::Equivalence,
        0.0,
    );
    let problem = task.draw(Split::Train, 1, 0).unwrap();
    assert_eq!(task.verify(&problem, &format!("<answer>{}</answer>", problem.answer)).reward, 0.0);
}

/// Problems in verl's layout, each inside of a template, against the same problems as bare text, and the
/// other way.
#[test]
fn problems_in_verl_s_layout_are_test_problems() {
    let problems =
        ["What is 2+2?", "Half of one?", "How many primes are there between 10 and 20, both excluded?"];
    let lines: String =
        problems.iter().map(|p| format!("{{\"problem\": \"{p}\", \"answer\": \"4\"}}\n")).collect();
    let bare = read(Scratch::new("bare.jsonl", lines.as_bytes()).path()).unwrap();
    let other = "{\"problem\": \"What is 2+3?\", \"answer\": \"5\"}\n";
    let other = read(Scratch::new("other.jsonl", other.as_bytes()).path()).unwrap();
    let wrapped: Vec<Vec<Row>> = [DAPO, DEEPSCALER, GSM8K, PLAIN]
        .iter()
        .map(|template| {
            let texts = problems.map(|problem| template.apply(problem).plain());
            let rows: Vec<(&str, &str)> = texts.iter().map(|text| (text.as_str(), "4")).collect();
            let name = format!("wrapped-{}.parquet", template.name);
            read(Scratch::new(&name, &write_verl_parquet(&rows)).path()).unwrap()
        })
        .collect();
    for (a, set) in wrapped.iter().enumerate() {
        assert!(matches!(&set[0].problem, Prompt::Chat(messages) if messages.len() == 2));
        for test in wrapped.iter().chain([&bare]) {
            let train: Vec<Row> = set.iter().chain(&other).cloned().collect();
            let task =
                DatasetTask::new("verl", train, PLAIN, Policy::Equivalence, 0.0).with_test_rows(test.clone());
            assert_eq!((task.overlaps(), task.len(Split::Train)), (3, Some(1)), "template {a}");
        }
        assert_eq!(without_overlap(bare.clone(), set), []);
        // Copies of a problem land on the same side of a split by shares, too.
        let copies: Vec<Row> = set.iter().chain(&bare).cloned().collect();
        let task = DatasetTask::new("copies", copies, PLAIN, Policy::Equivalence, 0.5);
        assert_eq!(task.len(Split::Train).unwrap() % 2, 0);
    }
}

#[test]
fn overlaps_of_the_shared_sets() {
    let Some(data) = crate::common::shared_data() else { return };
    let set = |name: &str| {
        let found = ["jsonl", "jsonl.gz"]
            .map(|end| data.join(format!("{name}.{end}")))
            .into_iter()
            .find(|f| f.exists());
        read(&found.unwrap()).unwrap()
    };
    // Training sets; test sets; problems that are equal by letters and digits; those that stand inside of
    // another.
    let known = std::fs::read_to_string(data.join("overlaps.jsonl")).unwrap();
    let known: Vec<serde_json::Value> =
        known.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (train, inside) in
        [("dapo17k/train", 28), ("deepscaler/train_aime", 0), ("deepscaler/train_partial", 0)]
    {
        let tests =
            ["math500/test", "amc23/test", "amc/test", "olympiad_bench/test", "aime24/test", "minerva/test"];
        let rows = set(train);
        let equal: HashSet<&str> = known
            .iter()
            .filter(|pair| {
                pair["train_file"] == train && tests.contains(&pair["eval_file"].as_str().unwrap())
            })
            .map(|pair| pair["train_id"].as_str().unwrap())
            .collect();
        let test: Vec<Row> = tests.iter().flat_map(|name| set(name)).collect();
        let kept = without_overlap(rows.clone(), &test);
        let kept: HashSet<&str> = kept.iter().map(|row| row.id.as_str()).collect();
        assert!(equal.iter().all(|id| !kept.contains(id)), "{train}: a known overlap is kept");
        assert_eq!(rows.len() - kept.len(), equal.len() + inside, "{train}");
    }
}

/// A field that is there is not looked for under another name, and not said to be missing.
#[test]
fn a_field_of_no_use_is_named_with_what_it_is() {
    let dir = std::env::temp_dir().join(format!("qurl-fields-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    let file = dir.join("rows.jsonl");
    let said = |row: &str| {
        std::fs::write(&file, format!("\n{row}\n")).expect("written");
        let said = read(&file).expect_err("a bad row").to_string();
        said.strip_prefix(&format!("{}, line 2: ", file.display())).expect("the place").to_string()
    };
    let (problem, answer) = (
        "expected a text or chat messages (`role`, `content`)",
        "expected a text, a number or a list of them",
    );
    for (row, found, expected) in [
        (r#"{"problem": "", "answer": "1"}"#, "`problem` is empty", problem),
        (r#"{"problem": null, "answer": "1"}"#, "`problem` is null", problem),
        (r#"{"question": 5, "answer": "1"}"#, "`question` is 5", problem),
        (r#"{"prompt": [], "answer": "1"}"#, "`prompt` is an empty list", problem),
        (r#"{"prompt": [{"role": "user"}], "answer": "1"}"#, "`prompt` is a list of something else", problem),
        (r#"{"problem": "1", "answer": " "}"#, "`answer` is empty", answer),
        (r#"{"problem": "1", "answer": null}"#, "`answer` is null", answer),
        (
            r#"{"problem": "1", "reward_model": {"ground_truth": ""}}"#,
            "`reward_model.ground_truth` is empty",
            answer,
        ),
    ] {
        assert_eq!(said(row), format!("{found}, {expected}"));
    }
    assert!(
        said(r#"{"problem": "1", "solution": "2"}"#).contains("found the keys [\"problem\", \"solution\"]")
    );
    assert_eq!(said(r#"{"problem": }"#), "not a JSON object: expected value at column 13");
    std::fs::remove_dir_all(&dir).expect("removed");
}
