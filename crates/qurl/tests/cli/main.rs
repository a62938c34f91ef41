//! The command as its users meet it: every test here starts the program itself.

mod bench;
mod browser;
mod common;
mod device;
mod eval;
mod full;
mod generate;
mod grade;
mod guide;
mod hostile;
mod messages;
mod models;
mod objective;
mod output;
mod pages;
mod paper;
mod prompts;
mod quantize;
mod recipe;
mod references;
mod runs;
mod score;
mod screenshots;
mod serve;
mod tracking;
mod view;
