//! Chat templates in a process of their own, for programs that go on whatever a template does.
//!
//! A template can double a text in one instruction, and no thread can be stopped in the middle of that: its
//! memory would be the server's. A process has a limit of its own, ends when it runs into it, and is
//! replaced. It is kept for the next conversation otherwise, since starting one takes longer than rendering.
//!
//! Both sides speak lines of JSON: first what the template is made of, then a conversation, a reply, a
//! conversation, and so on. The process ends where its input does, so it does not outlive its server.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::bounds::PATIENCE;
use super::{ChatError, ChatTemplate, Origin};

/// Bytes of address space that the process limits itself to, its stack of 256 MiB among them.
pub const RENDERER_MEMORY: u64 = 1 << 30;
/// Bytes of a line in either direction: what the longest text takes where each byte is escaped.
const MAX_LINE: u64 = 512 << 20;
/// How long a reply may take. The process gives up earlier by itself, unless the machine is overloaded.
const LIMIT: Duration = Duration::from_secs(2 * PATIENCE.time.as_secs());

#[derive(Serialize)]
struct Request<'a> {
    messages: &'a Value,
    add_generation_prompt: bool,
    variables: &'a Map<String, Value>,
}

#[derive(Deserialize)]
struct Conversation {
    messages: Value,
    add_generation_prompt: bool,
    variables: Map<String, Value>,
}

#[derive(Serialize, Deserialize)]
enum Reply {
    Text(String),
    Failed {
        line: usize,
        reason: String,
    },
    /// The last one: the process ends with the thread that it cannot stop.
    GaveUp(String),
}

/// A chat template that other processes render.
#[derive(Debug)]
pub struct Renderer {
    command: Vec<String>,
    /// Where there is no command: the template, which this process renders itself.
    here: Option<ChatTemplate>,
    origin: Origin,
    /// Processes that wait for a conversation: never more than there were callers at once.
    idle: Mutex<Vec<Process>>,
}

impl Renderer {
    /// Renders a template by processes that `command` starts; they call [`answer`]. Without a command this
    /// process renders it: for programs that trust their template.
    pub fn new(template: ChatTemplate, command: Vec<String>) -> Renderer {
        let origin = template.origin.clone();
        let here = command.is_empty().then_some(template);
        Renderer { command, here, origin, idle: Mutex::default() }
    }

    /// As [`ChatTemplate::render_json`].
    pub fn render_json(
        &self,
        messages: &Value,
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<String, ChatError> {
        if let Some(template) = &self.here {
            return template.render_json(messages, add_generation_prompt, variables);
        }
        let file = || self.origin.file.clone();
        let gave_up = |why: String| ChatError::GaveUp { file: file(), why };
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut process = match idle.and_then(Process::if_it_lives) {
            Some(process) => process,
            None => Process::start(&self.command, &self.origin)
                .map_err(|error| gave_up(format!("no process for it: {error}")))?,
        };
        let reply = match process.ask(&Request { messages, add_generation_prompt, variables }) {
            Ok(Reply::GaveUp(why)) | Err(why) => return Err(gave_up(why)),
            Ok(Reply::Text(text)) => Ok(text),
            Ok(Reply::Failed { line, reason }) => Err(ChatError::Render { file: file(), line, reason }),
        };
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(process);
        reply
    }
}

/// A process that renders one conversation after the other.
#[derive(Debug)]
struct Process {
    child: Child,
    stdin: ChildStdin,
    replies: Receiver<Reply>,
}

impl Process {
    fn start(command: &[String], origin: &Origin) -> io::Result<Process> {
        let [program, arguments @ ..] = command else { return Err(io::ErrorKind::InvalidInput.into()) };
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        // What it says when it runs out of memory is told by its end.
        command.stderr(Stdio::null());
        // A Ctrl-C at the terminal is for the server.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn()?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("its pipes could not be opened"));
        };
        let (sender, replies) = sync_channel(1);
        std::thread::spawn(move || read_replies(stdout, sender));
        let mut process = Process { child, stdin, replies };
        // A process that does not read it has no reply to the first conversation.
        let _ = write_line(&mut process.stdin, origin);
        Ok(process)
    }

    fn if_it_lives(mut self) -> Option<Process> {
        matches!(self.child.try_wait(), Ok(None)).then_some(self)
    }

    /// The reply to a conversation, or why there is none.
    fn ask(&mut self, request: &Request<'_>) -> Result<Reply, String> {
        // A process that no longer reads has no reply either.
        let _ = write_line(&mut self.stdin, request);
        self.replies.recv_timeout(LIMIT).map_err(|_| {
            let _ = self.child.kill();
            let end = self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
            let memory = RENDERER_MEMORY >> 20;
            format!("its process ended ({end}), expected a text within {:?} and {memory} MiB", PATIENCE.time)
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

fn read_replies(stdout: ChildStdout, replies: SyncSender<Reply>) {
    let (mut stdout, mut line) = (BufReader::new(stdout), Vec::new());
    while qurl_files::read_line(&mut stdout, &mut line, MAX_LINE).is_ok_and(|bytes| bytes > 0) {
        let Ok(reply) = serde_json::from_slice(&line) else { return };
        if replies.send(reply).is_err() {
            return;
        }
    }
}

fn write_line(mut output: impl Write, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    output.write_all(&line)?;
    output.flush()
}

/// The other side of a [`Renderer`]: renders the conversations that come in until the input ends, or one
/// takes more than it may.
pub fn answer(mut input: impl BufRead, mut output: impl Write) -> io::Result<()> {
    let mut line = Vec::new();
    qurl_files::read_line(&mut input, &mut line, MAX_LINE)?;
    let template = ChatTemplate::compile(serde_json::from_slice(&line)?).map_err(io::Error::other)?;
    while qurl_files::read_line(&mut input, &mut line, MAX_LINE)? > 0 {
        let reply = match serde_json::from_slice(&line) {
            Ok(conversation) => reply_to(&template, &conversation),
            Err(error) => Reply::Failed { line: 0, reason: format!("a conversation that is {error}") },
        };
        write_line(&mut output, &reply)?;
        if matches!(reply, Reply::GaveUp(_)) {
            break;
        }
    }
    Ok(())
}

fn reply_to(template: &ChatTemplate, conversation: &Conversation) -> Reply {
    let Conversation { messages, add_generation_prompt, variables } = conversation;
    match template.render_json(messages, *add_generation_prompt, variables) {
        Ok(text) => Reply::Text(text),
        Err(ChatError::Render { line, reason, .. }) => Reply::Failed { line, reason },
        Err(other) => Reply::GaveUp(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// What the process says to these lines after that of a template.
    fn replies(source: &str, lines: &[String]) -> Vec<Value> {
        let template = ChatTemplate::new(source, "a.jinja").expect("a template");
        let mut input = serde_json::to_string(&template.origin).expect("JSON");
        lines.iter().for_each(|line| input.extend(["\n", line]));
        let mut output = Vec::new();
        answer(input.as_bytes(), &mut output).expect("answered");
        let output = String::from_utf8(output).expect("text");
        output.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    #[test]
    fn conversations_are_answered_one_by_one() {
        let say = |content: &str| {
            json!({"messages": [{"role": "user", "content": content}], "add_generation_prompt": true,
                   "variables": {"sign": "?"}})
        };
        let source = "{{ messages[0].content }}{{ sign }}{% if messages[0].content == 'no' %}\n{{ 1 / 0 }}\
                      {% endif %}";
        let deep = format!("{{\"messages\": {}1{}", "[".repeat(200), "]".repeat(200));
        let found =
            replies(source, &[say("a\nb").to_string(), say("no").to_string(), deep, say("é").to_string()]);
        assert_eq!(
            (found.len(), &found[0], &found[3]),
            (4, &json!({"Text": "a\nb?"}), &json!({"Text": "é?"}))
        );
        assert_eq!(found[1]["Failed"]["line"], 2, "{found:?}");
        assert!(found[2]["Failed"]["reason"].as_str().is_some_and(|text| text.contains("recursion")));
    }

    #[test]
    fn what_cannot_be_started_or_ends_at_once_is_an_error() {
        let template = || ChatTemplate::new("a", "a.jinja").expect("a template");
        for (program, expected) in [("/nothing/here", "no process for it"), ("true", "its process ended")] {
            let renderer = Renderer::new(template(), vec![program.to_string()]);
            let error = renderer.render_json(&json!([]), true, &Map::new()).expect_err(program).to_string();
            assert!(error.starts_with("a.jinja: the chat template was given up"), "{error}");
            assert!(error.contains(expected), "{error}");
            assert!(renderer.idle.lock().expect("a list").is_empty());
        }
    }
}
