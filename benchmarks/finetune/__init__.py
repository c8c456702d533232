"""The benchmark `finetune`: a Hugging Face model within a real memory limit, through the tools people use."""
